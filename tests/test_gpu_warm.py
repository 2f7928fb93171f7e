"""On a GPU: what was compiled ahead is all that passes need, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from bench.shapes import random_model
from crosstune.memory.shape import ModelShape
from crosstune.model import head
from crosstune.model.base import adopt, norm_dtype
from crosstune.model.device import live_bytes
from crosstune.model.launches import Launches
from crosstune.model.warm import warm_up
from tests.launch_keys import CHUNK_BYTES, launched, run_passes, variants

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_after_the_warm_up_no_pass_compiles_a_kernel(quantization, monkeypatch):
    monkeypatch.setitem(head.CHUNK_BYTES, "cuda", CHUNK_BYTES)
    device = torch.device("cuda", torch.cuda.current_device())
    model = random_model("tiny", quantization, device, vocab=512)
    for kernel in launched().values():
        kernel.device_caches.clear()
    nested = True if quantization == "nf4" else None
    norms = norm_dtype(model, torch.bfloat16)
    shape, before = ModelShape.from_config(model.config.to_dict()), live_bytes(device)
    warming = warm_up(Launches(device, shape, torch.bfloat16, norms, nested, dropout=True))
    assert warming is not None
    warming.until_training()
    assert live_bytes(device) == before
    compiled = variants(device.index)
    once = dict.fromkeys(launched(), 1)
    assert compiled == {**once, "_rms_norm_backward": 2, "_rotate_back": 3, "_judge": 2, "_nf4": int(nested or 0)}
    run_passes(adopt(model, None))
    assert variants(device.index) == compiled
