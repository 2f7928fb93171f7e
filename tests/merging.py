"""What the tests of merging share: logits, PEFT's word on them, damage, refusal."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.errors import CrosstuneError, ModelError
from crosstune.export import merge
from crosstune.export.verify import encode_prompts

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def logits(model: torch.nn.Module, base: Path) -> torch.Tensor:
    """Over eight prompts, one after the other."""
    rows = encode_prompts(AutoTokenizer.from_pretrained(base))
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row.ids])).logits[0] for row in rows])


def with_adapter(base: Path, adapter: Path) -> torch.nn.Module:
    """PEFT's word on what base + adapter says, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


def assert_same_function(base: Path, adapter: Path, merged: Path, dtype: str = "float32") -> None:
    want = logits(with_adapter(base, adapter), base)
    got = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), base)
    # An error of one unit in the last place per matrix, 20 matrices, none of them cancelling, is never reached.
    assert (want - got).abs().max() <= max(20 * UNIT[dtype] * want.abs().max(), 1e-5)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def refused(tmp_path: Path, match: str, kind: type[CrosstuneError] = ModelError, **options) -> CrosstuneError:
    with pytest.raises(kind, match=match) as caught:
        merge(tmp_path / "adapter", tmp_path / "merged", **options)
    assert caught.value.exit_code == 2 and caught.value.fix
    assert not [path.name for path in tmp_path.iterdir() if "merged" in path.name], "something was left behind"
    return caught.value


def flip_bit(file: Path, place: float = 0.9) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 0x10
    file.write_bytes(data)
