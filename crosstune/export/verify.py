"""Is the merged model the same function as base + adapter? Measured on rows, by loading both as a user would.

The reference is PEFT's own forward on the unmerged base: another implementation than the one that merged.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from crosstune.errors import ModelError
from crosstune.model.device import named_device

MOST_POSITIONS = 1024  # × a vocabulary of 128,256 × 4 bytes: 0.5 GB of reference logits
# How far a stored number is from the true one, as a share of it: half a unit in the last place, or for int8 and NF4 the
# root mean square error over normally distributed weights, measured with bitsandbytes 0.50 (blocks of 64; rows).
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 0.009, "nf4": 0.096}
ROOM = 2.0  # times the expected noise before a merge counts as wrong; see `expected_noise`


PROMPTS = (
    "Name one tree.", "What colour is the sky at noon?", "Describe a lamp.", "How many days has a week?",
    "Translate 'good morning' into French.", "2 + 2 =", "Why do leaves fall in autumn?", "Name three kitchen tools.",
)  # fmt: skip


@dataclass(frozen=True)
class EncodedRow:
    """Token ids of one row, and which of them are targets (none: the row counts for logits only)."""

    ids: tuple[int, ...]
    learn: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Outputs:
    """What a model says about some rows: log-probabilities at every position, and the loss over the targets."""

    logits_PV: Tensor  # P positions of all rows, V vocabulary; fp32 on the CPU
    loss: float | None


@dataclass(frozen=True)
class Difference:
    """How far one model's next-token distributions are from another's, over the same positions."""

    max_logit: float
    mean_logit: float
    mean_kl: float
    max_kl: float
    same_next_token: float  # share of positions whose most likely token is the same

    def words(self) -> str:
        return (
            f"logits differ by {self.mean_logit:.2g} on average, {self.max_logit:.2g} at most · "
            f"KL {self.mean_kl:.2g} · same next token {self.same_next_token:.1%}"
        )


@dataclass(frozen=True)
class Verification:
    """The merged model against base + adapter, and both against the base."""

    rows: int
    positions: int
    compute: str  # dtype of the arithmetic
    merged: Difference
    adapter_effect: Difference  # base against base + adapter: what merging must not lose
    expected_noise: float  # mean difference of logits that rounding the merged weights explains
    loss_base: float | None
    loss_adapter: float | None
    loss_merged: float | None

    def words(self) -> str:
        """One line for a person."""
        losses = (self.loss_base, self.loss_adapter, self.loss_merged)
        loss = "" if None in losses else " · loss {:.4f}, base + adapter {:.4f}, merged {:.4f}".format(*losses)
        return f"{self.merged.words()} (the adapter changes them by {self.adapter_effect.mean_logit:.2g}){loss}"

    @property
    def is_same(self) -> bool:
        """Within rounding noise, and rounding noise only."""
        return math.isfinite(self.merged.mean_logit) and self.merged.mean_logit <= ROOM * self.expected_noise

    @property
    def drowns(self) -> bool:
        """Whether rounding is as large as what the adapter changes: the merged model has then lost part of it."""
        return self.merged.mean_logit > 0.5 * self.adapter_effect.mean_logit > 0.0


def difference(left: Tensor, right: Tensor) -> Difference:
    """How far the logits `right` are from the reference `left`, same positions (P, V). KL(left ‖ right) in nats."""
    if left.shape != right.shape:
        raise ModelError(
            f"the merged model has {right.shape[-1]} vocabulary entries, base + adapter {left.shape[-1]}",
            "The vocabulary was resized between the two: merge into the base that the adapter was trained on.",
        )
    biggest, total, kl, same = 0.0, 0.0, [], 0
    for one, two in zip(left.split(64), right.split(64), strict=True):  # 64 × 128,256 doubles: 66 MB
        gap = (one.double() - two.double()).abs()
        biggest, total = max(biggest, float(gap.max())), total + float(gap.mean(-1).sum())
        p, q = torch.log_softmax(one.double(), -1), torch.log_softmax(two.double(), -1)
        kl.append((p.exp() * (p - q)).sum(-1).clamp_min(0.0))
        same += int((one.argmax(-1) == two.argmax(-1)).sum())
    kls, count = torch.cat(kl), len(left)
    return Difference(biggest, total / count, float(kls.mean()), float(kls.max()), same / count)


def expected_noise(logits: Tensor, rounding: float, num_layers: int) -> float:
    """Mean logit difference that rounding every weight by a share `rounding` brings about.

    Each of L linear layers adds an error of about `rounding` times its own output, independent of the others; after
    L layers they add up like √L. Logits spread by σ around their mean, so |Δ| ≈ rounding · √L · σ. Measured over 36
    tiny models (2 and 8 layers, tied or not, fp32, fp16, bf16, int8, NF4): 0.03 to 0.8 of it. fp32 sums: some 2e-6 σ.
    """
    spread = float(logits.float().std())
    return (rounding * math.sqrt(num_layers) + 2e-6) * max(spread, 1e-3)


def outputs_of(model: nn.Module, rows: Sequence[EncodedRow], device: torch.device) -> Outputs:
    """Run the rows one by one: no padding, so no doubt about masks."""
    kept: list[Tensor] = []
    positions, loss_sum, targets = 0, 0.0, 0
    with torch.inference_mode(), quiet_products():
        for row in rows:
            ids = torch.tensor([row.ids], device=device)
            logits_TV = model(input_ids=ids, use_cache=False).logits[0].float()
            if any(row.learn):
                learn = torch.tensor(row.learn[1:], device=device)
                loss_sum += float(
                    nn.functional.cross_entropy(logits_TV[:-1][learn], ids[0, 1:][learn], reduction="sum")
                )
                targets += int(learn.sum())
            if positions < MOST_POSITIONS:
                kept.append(logits_TV[: MOST_POSITIONS - positions].cpu())
                positions += len(kept[-1])
    return Outputs(torch.cat(kept), loss_sum / targets if targets else None)


def outputs_of_adapter(
    base: Path, adapter: Path, rows: Sequence[EncodedRow], *, vocab_size: int, loading: Loading
) -> tuple[Outputs, Outputs]:
    """(base + adapter, base alone), by PEFT."""
    model = loading.load(base)
    if model.get_input_embeddings().weight.shape[0] != vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about tied weights
        model = PeftModel.from_pretrained(model, adapter).eval()
    changed = outputs_of(model, rows, loading.device)
    with model.disable_adapter():
        plain = outputs_of(model, rows, loading.device)
    return changed, plain


@dataclass(frozen=True)
class Trio:
    """The same rows through base, base + adapter, and the merged model."""

    base: Outputs
    changed: Outputs
    merged: Outputs


def verify(trio: Trio, *, rows: int, noise: float, loading: Loading) -> Verification:
    """Compare the merged model with base + adapter, and say what the adapter changes at all."""
    return Verification(
        rows=rows,
        positions=len(trio.changed.logits_PV),
        compute=_word(loading.dtype),
        merged=difference(trio.changed.logits_PV, trio.merged.logits_PV),
        adapter_effect=difference(trio.changed.logits_PV, trio.base.logits_PV),
        expected_noise=noise,
        loss_base=trio.base.loss,
        loss_adapter=trio.changed.loss,
        loss_merged=trio.merged.loss,
    )


def encode_prompts(tokenizer: PreTrainedTokenizerBase) -> list[EncodedRow]:
    """Eight short prompts as the model would see them, for when there are no rows at hand."""
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        return [EncodedRow(tuple(tokenizer(text, add_special_tokens=False).input_ids)) for text in texts]
    return [EncodedRow(tuple(tokenizer(prompt).input_ids)) for prompt in PROMPTS]


@dataclass(frozen=True)
class Loading:
    """How models are loaded to be compared: one at a time, on one device."""

    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False

    @classmethod
    def choose(
        cls, device: str, num_parameters: int, stored: torch.dtype, *, trust_remote_code: bool = False
    ) -> Loading:
        """fp32 arithmetic where the model fits so (nothing but the stored rounding shows then), else its own dtype."""
        where = named_device(device).device
        free_bytes = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else psutil.virtual_memory().available
        fits = num_parameters * 4 * 1.2 < free_bytes
        return cls(where, torch.float32 if fits else stored)

    def noise(self, outputs: Outputs, stored: str, num_matrices: int) -> float:
        """Mean logit difference to expect where weights are `stored` so (bfloat16, nf4 …) and multiplied in `dtype`."""
        return expected_noise(outputs.logits_PV, max(ROUNDING[stored], ROUNDING[_word(self.dtype)]), num_matrices)

    def load(self, folder: Path) -> Any:
        """The model in `folder`, ready to answer."""
        options: dict[str, Any] = {"dtype": self.dtype, "device_map": {"": self.device}}
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
        return model.eval()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """transformers' bars and advice off while a model is loaded for a comparison, then as they were."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_products() -> Iterator[None]:
    """bitsandbytes logs a warning on every int8 product ("inputs will be cast to float16"): thousands a row."""
    log = logging.getLogger("bitsandbytes.autograd._functions")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
