"""One lane's tensors as a PEFT folder, with all that is needed to answer with it.

Knows PEFT's file format (file names, key names, config) and nothing of lanes, waves or runs.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from transformers import GenerationConfig

from crosstune.export.card import model_card, public_facts, public_name, versions
from crosstune.export.folder import Draft, write_checksums
from crosstune.export.serve import serve_section, write_modelfile
from crosstune.export.weights import write_tensors
from crosstune.recipe.sections import Lora
from crosstune.store.secrets import redact, redact_tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, CONFIG, GENERATION = "adapter_model.safetensors", "adapter_config.json", "generation_config.json"
FACTS = "crosstune.json"  # the card's facts, for machines
BASE_CHECKSUMS = "BASE_SHA256SUMS"  # the base's weight files, as they were when the adapter was trained
KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")

ONE_AT_A_TIME = threading.Lock()  # for what libraries write: none of them says that two threads may do it at once


class TokenizerFiles:
    """Writes a tokenizer's files into folder after folder: made once (75 ms for Llama 3's), then kept as bytes.

    The tokenizer must not change meanwhile.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._made: dict[Path, bytes] = {}  # by name within the folder

    def __call__(self, folder: Path) -> None:
        with ONE_AT_A_TIME:
            if not self._made:
                before = set(folder.rglob("*"))
                self._tokenizer.save_pretrained(folder)
                files = [file for file in folder.rglob("*") if file.is_file() and file not in before]
                self._made = {file.relative_to(folder): file.read_bytes() for file in files}
                return
        for name, content in self._made.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def save_adapter(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    lora: Lora,
    *,
    target_names: Iterable[str],
    base_name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: Iterable[int],
    card: Mapping[str, Any],
    base_files: Mapping[str, str] | None = None,
    tokenizer_files: TokenizerFiles | None = None,
) -> None:
    """Write a folder that `PeftModel.from_pretrained`, vLLM and llama.cpp's converter open.

    tensors       under PEFT's names, base_model.model.<module>.lora_A.weight (rank, in) and …lora_B.weight (out, rank);
                  written in fp32, and the same values always give the same bytes
    target_names  the adapted modules, by full name (model.layers.0.self_attn.q_proj), or by a last part that names
                  exactly them: PEFT adapts every module whose name ends in it
    base_name     hub id or folder, kept in the config so that PEFT finds the base; the card shows no path
    stop_ids      every token that ends an answer; all of them go into generation_config.json
    card          facts for README.md: plain values, and mappings, which become tables of their own
    base_files    SHA-256 of the base's weight files (`weights_checksums`): merging into others is then refused
    tokenizer_files  the tokenizer's, if they were made before
    """
    draft = draft_adapter(
        folder,
        tensors,
        lora,
        target_names=target_names,
        base_name=base_name,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        base_files=base_files,
        tokenizer_files=tokenizer_files,
    )
    finish_adapter(draft, card, lora, base_name=base_name)


def draft_adapter(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    lora: Lora,
    *,
    target_names: Iterable[str],
    base_name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: Iterable[int],
    base_files: Mapping[str, str] | None = None,
    tokenizer_files: TokenizerFiles | None = None,
) -> Draft:
    """What `save_adapter` writes before its card: nearly all, and on the disk, while a lane may still be scored."""
    names, base_name = sorted(set(target_names)), redact(base_name)  # a URL may hold a password
    _assert_whole(tensors, lora, names)
    draft = Draft(folder, marker=CONFIG)
    with draft.filling() as work:
        write_tensors(work / WEIGHTS, {key: _plain(tensor) for key, tensor in tensors.items()})
        if tokenizer is not None:
            (tokenizer_files or TokenizerFiles(tokenizer))(work)
        with ONE_AT_A_TIME:
            write_json(work / CONFIG, peft_config(lora, names, base_name))
            write_generation_config(work, tokenizer, stop_ids)
            if tokenizer is not None:
                write_modelfile(work, tokenizer, stop_ids, source={"FROM": public_name(base_name), "ADAPTER": "."})
        if base_files:
            sums = "".join(f"{digest}  {name}\n" for name, digest in sorted(base_files.items()))
            (work / BASE_CHECKSUMS).write_text(sums, encoding="utf-8")
        draft.settle()
    return draft


def finish_adapter(draft: Draft, card: Mapping[str, Any], lora: Lora, *, base_name: str) -> None:
    """Write the card and the checksums, and put the folder in its place."""
    base_name = redact(base_name)
    with draft.filling() as work:
        facts = public_facts(redact_tree(dict(card)))
        write_json(work / FACTS, {"base": public_name(base_name), "card": facts, "versions": versions()}, sort=False)
        serve = serve_section("adapter", base_name=base_name, rank=lora.rank)
        text = model_card(facts, base_name=base_name, kind="adapter", serve=serve)
        (work / "README.md").write_text(text, encoding="utf-8")
        draft.settle()
        write_checksums(work, known=draft.digests)
        draft.put()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is written. One that is so already isn't touched: each call gives Python's lock away."""
    is_plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor if is_plain and not tensor.requires_grad else tensor.detach().to("cpu", torch.float32).contiguous()


def peft_config(lora: Lora, target_names: Sequence[str], base_name: str) -> dict[str, Any]:
    """PEFT's own config of this adapter as a dict. PEFT holds target modules as an unordered set: sorted."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated int; PEFT only divides it, and writes 12.5 as 12.5
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=list(target_names),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
        inference_mode=True,
    )
    fields = config.to_dict()
    if float(lora.alpha).is_integer():
        fields["lora_alpha"] = int(lora.alpha)  # vLLM and llama.cpp's converter read a whole number
    return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}


def write_generation_config(folder: Path, tokenizer: PreTrainedTokenizerBase | None, stop_ids: Iterable[int]) -> None:
    """generation_config.json with every stop token, and the tokenizer's BOS and padding.

    One missing stop token and the model talks on to the length limit (meta-llama/llama-cookbook#640).
    """
    own = [] if tokenizer is None else [tokenizer.eos_token_id]
    stops = sorted({int(token) for token in [*own, *stop_ids] if token is not None})
    fields: dict[str, Any] = {"eos_token_id": stops or None}
    if tokenizer is not None:
        fields |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    GenerationConfig(**fields).save_pretrained(folder)


def write_json(file: Path, tree: Mapping[str, Any], *, sort: bool = True) -> None:
    """`tree` as JSON: equal values, equal bytes. With `sort` False the keys keep their order, which a card follows."""
    text = json.dumps(tree, indent=2, sort_keys=sort, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _assert_whole(tensors: Mapping[str, torch.Tensor], lora: Lora, target_names: Sequence[str]) -> None:
    """Ours to keep, so asserts: an A and a B of the lane's rank for each target, and a target for each."""
    sides: dict[str, set[str]] = {}
    for key, tensor in tensors.items():
        match = KEY.match(key)
        assert match, f"{key} is not a name that PEFT reads"
        sides.setdefault(match["module"], set()).add(match["side"])
        rank = tensor.shape[0] if match["side"] == "A" else tensor.shape[1]
        assert rank == lora.rank, f"{key} has rank {rank}, the lane {lora.rank}"
    assert tensors and all(found == {"A", "B"} for found in sides.values()), "half an adapter"
    by_end: dict[str, list[str]] = {}  # "q_proj", "self_attn.q_proj", … → modules that end so
    for module in sides:
        parts = module.split(".")
        for start in range(len(parts)):
            by_end.setdefault(".".join(parts[start:]), []).append(module)
    missing = [name for name in target_names if name not in by_end]
    assert not missing, f"no tensor for {missing}"
    covered = {module for name in target_names for module in by_end[name]}
    assert covered == set(sides), f"no target name for {sorted(set(sides) - covered)}"
