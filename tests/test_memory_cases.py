"""Public failures about memory, each in a process of its own (case M02)."""

import json
import subprocess
import sys

import pytest
import torch

from tests.tiny import make_tiny

EVALUATE = """
import json, resource, sys
import numpy as np, torch
from tests.lanes import fp32_base, tokens_of
from crosstune.train.evaluate import score_base
base = fp32_base({folder!r})
row = [360] + list(range(5, 260))
tokens = tokens_of([row] * {rows}, [[place >= 128 for place in range(256)]] * {rows})
scores = score_base(base, tokens, range({rows}), most_tokens=256)
print(json.dumps([scores.loss, scores.token_accuracy, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def evaluate(folder, rows):
    code = EVALUATE.format(folder=str(folder), rows=rows)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_case_m02_an_evaluation_takes_no_more_memory_for_more_rows(tmp_path):
    """32 rows of fp32 logits would be 4.2 GB. The loss is transformers' own, over the same targets."""
    folder = make_tiny(tmp_path / "tiny", vocab=128256)
    few, many = evaluate(folder, 4), evaluate(folder, 32)
    assert many[2] - few[2] < 150_000_000
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[360, *range(5, 260)]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, 127:-1], ids[0, 128:])
    assert many[0] == pytest.approx(float(loss), abs=1e-4) == pytest.approx(few[0], abs=1e-4)
