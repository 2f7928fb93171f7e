"""The tracker and the allocator model against readings of an H200: PEFT, one adapter, AdamW, bf16 (torch 2.11).

`h200_peft.jsonl` holds torch.cuda.max_memory_allocated and _reserved of real steps. Here the same steps run on meta tensors.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from crosstune.memory.gpus import MIB, find_gpu
from crosstune.memory.replay import replay
from crosstune.model.base import Base
from crosstune.train.kernels import attention_of, temporaries_of
from crosstune.train.quantized import quantize_linears
from crosstune.train.trace import META, Inside, Tracker

CELLS = [json.loads(line) for line in (Path(__file__).parent / "cases" / "h200_peft.jsonl").read_text().splitlines()]
SIZES = {  # hidden, layers, heads, kv heads, MLP, vocabulary, tied
    "1b": (2048, 16, 32, 8, 8192, 128256, True), "8b": (4096, 32, 32, 8, 14336, 128256, False),
    "1bs": (2048, 16, 32, 8, 8192, 1024, True), "8bs": (4096, 32, 32, 8, 14336, 1024, False),
}  # fmt: skip
WORKSPACE = 32 * MIB  # cuBLAS, once for the forward and once for the backward thread
QUICK = [
    cell
    for cell in CELLS
    if cell["name"] == "1bs" and cell["r"] == 8 and (cell["B"], cell["T"]) in ((1, 2048), (1, 128))
]


class MetaAdamW(torch.optim.AdamW):
    """torch refuses to step fused on meta; the kernel itself allocates only the states."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=META)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def peft_model(cell):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads, kv_heads, mlp, vocab, tied = SIZES[cell["name"]]
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=mlp, vocab_size=vocab, tie_word_embeddings=tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    try:
        with META:
            model = LlamaForCausalLM(config).requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    if cell["quant"] == "nf4":
        quantize_linears(Base(model, None, META, torch.bfloat16, "llama"), "nf4", double_quant=True)
        model.is_loaded_in_4bit = True
    lora = LoraConfig(r=cell["r"], target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    if cell["ckpt"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    return model, vocab


def steps_of_peft(cell):
    """Trace of a build and two steps."""
    tracker = Tracker(temporaries_of(find_gpu("h200")))
    with attention_of(find_gpu("h200"), "bf16"), tracker:
        model, vocab = peft_model(cell)
        tracker.track_module(model)
        tracker.trace.append(("begin", 0, 0))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = MetaAdamW(trained, lr=1e-4)
        ids = torch.randint(0, vocab, (cell["B"], cell["T"]), device=META)
        batch = {"input_ids": ids, "labels": ids.clone()}
        for _ in range(2):
            out = model(**batch)
            loss = out.loss
            del out
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return list(tracker.trace)


def check(cell):
    shown = replay(steps_of_peft(cell), first=(WORKSPACE, WORKSPACE))
    assert math.isclose(shown.peak_allocated, cell["alloc_peak"], rel_tol=0.005, abs_tol=32 * MIB), shown
    assert math.isclose(shown.peak_reserved, cell["reserved_peak"], rel_tol=0.04, abs_tol=128 * MIB), shown
    return shown


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: f"{cell['quant']}-{cell['ckpt']}-{cell['T']}")
def test_peaks_of_a_small_vocabulary_equal_the_gpus(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", CELLS, ids=lambda cell: "-".join(str(cell[k]) for k in ("name", "quant", "r", "ckpt", "B", "T"))
)
def test_peaks_equal_the_gpus(cell):
    shown = check(cell)
    print(shown.peak_allocated / cell["alloc_peak"] - 1, shown.peak_reserved / cell["reserved_peak"] - 1)


@pytest.mark.parametrize(
    ("first", "stacked", "seen"),
    [
        (False, False, "+result +3 +5 -3 -5"), (False, True, "+result +3 +5 -5 -3"),
        (True, False, "+3 +5 +result -3 -5"), (True, True, "+3 +5 +result -5 -3"),
    ],
)  # fmt: skip
def test_a_kernels_temporaries_come_and_go_in_the_order_that_its_rule_says(first, stacked, seen):
    tracker = Tracker({"aten::mm": lambda args, kwargs: Inside([3, 5], first=first, stacked=stacked)})
    x = torch.empty(4, 4, device=META)
    with tracker:
        out = x @ x
    born = {key: "result" if size == out.nbytes else str(size) for kind, key, size in tracker.trace if kind == "born"}
    assert " ".join("+-"[kind == "died"] + born[key] for kind, key, _ in tracker.trace) == seen
