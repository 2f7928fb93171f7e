"""Base + adapter as one model that answers as they did: merged, written, compared, and only then put in place.

    report = merge("runs/rows/lanes/trial-0/all/adapter", "merged", rows=held_out)
    print(report.words())

Memory: one shard while merging, one model while verifying. A merge that fails leaves nothing behind.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from crosstune.errors import ModelError, RunError
from crosstune.export.adapter import FACTS, write_json
from crosstune.export.card import model_card, public_name
from crosstune.export.companions import merged_config, stop_ids_in, write_companions
from crosstune.export.folder import CHECKSUMS, new_folder, refuse_occupied, refuse_sources, write_checksums
from crosstune.export.merger import Merger, plan_merge, write_shards, wrong_tensors
from crosstune.export.origin import find_origin
from crosstune.export.quantize import Quantization, write_quantized
from crosstune.export.saved import (
    adapter_config,
    adapter_folder,
    model_config,
    read_adapter,
    read_facts,
    recorded_checksums,
)
from crosstune.export.serve import serve_commands, serve_section, write_modelfile
from crosstune.export.verify import (
    EncodedRow,
    Loading,
    Trio,
    Verification,
    encode_prompts,
    outputs_of,
    outputs_of_adapter,
    verify,
)
from crosstune.export.weights import refuse_other_weights
from crosstune.progress import Progress, Quiet
from crosstune.store.files import guard, make_folder
from crosstune.units import bytes_words, seconds_words

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MergeReport:
    """What was written, and how it was found to be right."""

    out: Path
    base: str
    dtype: str
    quantize: str
    files: tuple[str, ...]
    num_parameters: int
    num_bytes: int
    layers: int
    verification: Verification
    quantized: Verification | None
    notes: tuple[str, ...]
    commands: dict[str, str]  # server → command
    seconds: float

    def words(self) -> str:
        """A few lines for a person."""
        lines = [
            f"{self.out}: {self.layers} layers merged into {public_name(self.base)}, {self.dtype}, "
            f"{len(self.files)} file(s), {bytes_words(self.num_bytes)}, {seconds_words(self.seconds)}",
            f"against base + adapter on {self.verification.rows} rows: {self.verification.words()}",
        ]
        if self.quantized is not None:
            lines.append(f"in {self.quantize}: {self.quantized.words()}")
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"{server}: {command}" for server, command in self.commands.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "out": str(self.out)}


def merge(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    quantize: Quantization = "none",
    base: str | None = None,
    rows: Sequence[EncodedRow] | None = None,
    into_quantized: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> MergeReport:
    """Merge the adapter of `source` (an adapter's folder, or a run with a fit) into its base and write it to `out`.

    dtype           fp32, bf16 or fp16; default: each tensor keeps its own
    quantize        nf4 or int8: write the merged model quantised, verified a second time as such
    base            hub id, folder or .gguf of the base; default: the one that the adapter names
    rows            rows to compare on, held-out ones by preference; those with targets also give the loss before and
                    after. Default: eight short prompts
    into_quantized  merge into a base that was rounded to 4 or 8 bit, with what that costs in the report
    device          where the comparison runs; merging itself needs no GPU

    Raises ModelError if the adapter doesn't fit its base, or if the merged model differs from base + adapter by more
    than rounding explains; `out` is then not written.
    """
    began, place, progress = time.monotonic(), Path(out).expanduser(), progress or Quiet()
    folder = adapter_folder(source)
    name = base or adapter_config(folder).base_model_name_or_path or ""
    refuse_occupied(place, marker=CHECKSUMS)
    refuse_sources(place, (folder, Path(name).expanduser()))
    disk = place.resolve().parent
    with guard("writing", place):
        make_folder(disk)
    with tempfile.TemporaryDirectory(dir=disk, prefix=f".{place.name}.work.") as scratch_name:
        scratch = Path(scratch_name)
        origin = find_origin(name, scratch / "base", into_quantized=into_quantized, dtype=_dtype(dtype))
        refuse_other_weights(origin.named_folder, recorded_checksums(folder))
        adapter = read_adapter(folder, model_config({"pretrained_model_name_or_path": origin.weights.folder}))
        merger = plan_merge(origin.weights, adapter, _dtype(dtype))
        refuse_full_disk(disk, merger.num_bytes * (1 if quantize == "none" else 2))
        with new_folder(place, marker=CHECKSUMS) as work, guard("writing", place):
            plain = work if quantize == "none" else scratch / "merged"
            plain.mkdir(exist_ok=True)
            write_shards(merger, plain, progress)
            write_json(plain / "config.json", merged_config(merger))
            tokenizer = write_companions(merger, plain)
            check = Check(merger, origin.reference, rows or encode_prompts(tokenizer), device)
            found = check.plain(plain)
            quantized = None
            if quantize != "none":
                write_quantized(plain, work, quantize, device=check.loading.device, dtype=check.loading.dtype)
                write_companions(merger, work)  # its config.json says how it is quantised
                quantized = check.quantized(work, quantize)
            report = MergeReport(
                out=place,
                base=name,
                dtype=str(merger.dtype).removeprefix("torch."),
                quantize=quantize,
                files=tuple(sorted(file.name for file in work.glob("*.safetensors"))),
                num_parameters=merger.num_parameters,
                num_bytes=sum(file.stat().st_size for file in work.glob("*.safetensors")),
                layers=adapter.layers,
                verification=found,
                quantized=quantized,
                notes=(*origin.notes, *_notes(merger, found, quantized)),
                commands=serve_commands(place, kind="merged"),
                seconds=time.monotonic() - began,
            )
            _write_rest(work, report, tokenizer, read_facts(folder))
    return report


class Check:
    """Compares what was written with base + adapter; the reference is computed once."""

    def __init__(self, merger: Merger, reference: Path, rows: Sequence[EncodedRow], device: str) -> None:
        self.merger, self.rows = merger, rows
        self.loading = Loading.choose(device, merger.num_parameters, merger.dtype)
        self.changed, self.base = outputs_of_adapter(
            reference, merger.adapter.folder, rows, vocab_size=merger.adapter.vocab_size, loading=self.loading
        )

    def plain(self, folder: Path) -> Verification:
        """Every tensor bit for bit, then the answers; raises ModelError if either is wrong."""
        wrong = wrong_tensors(self.merger, folder)
        if wrong:
            raise ModelError(
                f"{wrong[0]} ({len(wrong)} tensor(s)) reads back otherwise than it was written",
                "Check the disk and merge again.",
            )
        found = self._compare(folder, str(self.merger.dtype).removeprefix("torch."))
        if not found.is_same:
            raise ModelError(
                f"the merged model is not base + adapter: {found.merged.words()}; rounding explains "
                f"{found.expected_noise:.2g}. Nothing was written",
                "Please report it with the model's name; PEFT's merge_and_unload is another way.",
            )
        return found

    def quantized(self, folder: Path, kind: Quantization) -> Verification:
        """The quantised model's answers; raises ModelError if they are further off than its rounding explains."""
        found = self._compare(folder, kind)
        if not found.is_same:
            raise ModelError(
                f"the merged model in {kind} answers otherwise: {found.merged.words()}; "
                f"rounding explains {found.expected_noise:.2g}",
                "Deploy the merged model without quantize, or the adapter on the quantised base.",
            )
        return found

    def _compare(self, folder: Path, stored: str) -> Verification:
        merged = outputs_of(self.loading.load(folder), self.rows, self.loading.device)
        noise = self.loading.noise(self.changed, stored, self.merger.num_matrices)
        return verify(Trio(self.base, self.changed, merged), rows=len(self.rows), noise=noise, loading=self.loading)


def refuse_full_disk(folder: Path, need_bytes: int) -> None:
    """Refuse before anything is written if the disk of `folder` can't take it."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes * 1.02:
        raise RunError(
            f"the merged model needs {bytes_words(need_bytes)}, and {folder} has {bytes_words(free_bytes)} free",
            "Free some space, choose another place, or ask for a smaller dtype.",
        )


def _dtype(word: str | None) -> torch.dtype | None:
    if word is None:
        return None
    if word not in DTYPES:
        raise ModelError(f"there is no dtype {word!r}", f"Choose one of {', '.join(DTYPES)}.")
    return DTYPES[word]


def _notes(merger: Merger, found: Verification, quantized: Verification | None) -> list[str]:
    notes = []
    if merger.unties:
        notes.append("input and output embeddings were one matrix and now differ: the model has grown by one of them")
    if found.drowns:
        notes.append(
            f"warning: rounding to {merger.dtype} changes the logits by {found.merged.mean_logit:.2g}, the adapter by "
            f"only {found.adapter_effect.mean_logit:.2g}: part of it is lost. Merge with fp32, or deploy the adapter"
        )
    if quantized is not None and quantized.drowns:
        notes.append(
            f"warning: quantising changes the logits by {quantized.merged.mean_logit:.2g}, the adapter by "
            f"{quantized.adapter_effect.mean_logit:.2g}"
        )
    return notes


def _write_rest(work: Path, report: MergeReport, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
    """Modelfile, card, checksums: last, because they speak of everything else."""
    write_modelfile(work, tokenizer, stop_ids_in(work), source={"FROM": "."})
    checks = {"base + adapter, merged": report.verification} | (
        {report.quantize: report.quantized} if report.quantized else {}
    )
    tables = {f"Verified: {name}": _card_rows(check) for name, check in checks.items() if check is not None}
    card = {
        **facts,
        "dtype": report.dtype,
        "quantized": report.quantize,
        **tables,
        "Notes": dict(enumerate(report.notes, 1)),
    }
    text = model_card(
        card, base_name=report.base, kind="merged model", serve=serve_section("merged", base_name=report.base)
    )
    (work / "README.md").write_text(text, encoding="utf-8")
    write_json(work / FACTS, {"base": public_name(report.base), "card": facts, "merge": _public(report)}, sort=False)
    write_checksums(work)


def _public(report: MergeReport) -> dict[str, Any]:
    hidden = ("out", "commands", "seconds", "base")  # places of this machine, and what differs between equal merges
    return {key: value for key, value in report.to_dict().items() if key not in hidden}


def _card_rows(check: Verification) -> dict[str, Any]:
    return {
        "rows": check.rows,
        "positions": check.positions,
        "largest difference of a logit": check.merged.max_logit,
        "mean difference of a logit": check.merged.mean_logit,
        "what the adapter changes (mean)": check.adapter_effect.mean_logit,
        "KL divergence (mean, nats)": check.merged.mean_kl,
        "same next token": check.merged.same_next_token,
        "loss of base, base + adapter, merged": [check.loss_base, check.loss_adapter, check.loss_merged],
    }
