"""Ask a base, adapters on it and merged models the same questions, and see the answers side by side.

    for answer in generate(["base", "runs/rows", "merged"], ["Name one tree."], on_text=print_piece):
        …

Questions are rendered and encoded as rows of training are, so that what is asked is what was learned.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase, TextStreamer

from crosstune.data.load import load_rows
from crosstune.data.questions import last_run
from crosstune.data.render import Renderer
from crosstune.data.rows import Row, Rows, Turn
from crosstune.data.tokenizer import ready_tokenizer
from crosstune.data.tokens import Encoder
from crosstune.errors import DataError, ModelError, refuse
from crosstune.export.companions import has_tokenizer, load_saved_tokenizer, stop_ids_in
from crosstune.export.saved import (
    adapter_config,
    adapter_folder,
    check_adapter,
    holds_adapter,
    model_config,
    read_facts,
)
from crosstune.export.verify import quiet_products
from crosstune.model.base import hub_arguments, load_base
from crosstune.model.device import named_device
from crosstune.recipe.sections import Data, Model
from crosstune.train.generate import Sampling

BASE = "base"  # among the sources: the base of the first adapter, without any
Source = str | os.PathLike[str]
OnText = Callable[[str, int, str], None]  # source, number of the question (from 0), the next piece of its answer


@dataclass(frozen=True)
class Answer:
    """What one source said to one question. `stopped` False: cut off at the limit instead of ending by itself."""

    source: str
    question: int  # from 0
    text: str
    ids: tuple[int, ...]  # with the stop token, if there is one
    stopped: bool
    seconds: float


@dataclass
class Answerer:
    """A model that answers: plain, or with one adapter of those that share its base."""

    name: str
    model: Any
    adapter: str | None
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]

    def answer(self, questions: Sequence[Sequence[int]], sampling: Sampling, streamer: Any = None) -> list[list[int]]:
        """New ids for each question, up to and with its stop token. Padded on the left; a streamer takes one."""
        width = max(len(ids) for ids in questions)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in questions], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in questions], device=self.model.device)
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(self.stop_ids),
            pad_token_id=pad,
            **(how if sampling.temperature else {"do_sample": False}),
        )
        torch.manual_seed(sampling.seed)
        with torch.inference_mode(), self._as_asked(), quiet_products(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the folder's own sampling settings are not used, and are said to be so
            new = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer)[
                :, width:
            ]
        return [_until_stop(row, self.stop_ids) for row in new.tolist()]

    def _as_asked(self) -> AbstractContextManager[Any]:
        if not isinstance(self.model, PeftModel):
            return nullcontext()
        if self.adapter is None:
            return self.model.disable_adapter()
        self.model.set_adapter(self.adapter)
        return nullcontext()


def generate(
    sources: Source | Sequence[Source],
    asked: str | Sequence[str] | Rows,
    *,
    sampling: Sampling | None = None,
    base: str | None = None,
    quantization: str | None = None,
    device: str = "auto",
    on_text: OnText | None = None,
    batch_size: int = 8,
) -> Iterator[Answer]:
    """Yield the answer of every source to every question, question by question.

    sources       one or several of "base", adapter folders or runs with a fit, merged folders, hub ids, .gguf files
    asked         a prompt or several (each one user turn), or rows as in training: asked for their last answer
    sampling      default: greedy, at most 256 new tokens
    base          hub id, folder or .gguf of the adapters' base; default: the one that each names
    quantization  none, int8 or nf4 of the adapters' base; default: as it was trained
    on_text       called with every piece of text as it is made; the questions then run one by one
    """
    sampling = sampling or Sampling(max_new_tokens=256)
    named = [os.fspath(one) for one in ([sources] if isinstance(sources, str | os.PathLike) else sources)]
    asked = [asked] if isinstance(asked, str) else asked
    answerers = open_answerers(named, base=base, quantization=quantization, device=device)
    encoded = {answerer.name: encode_questions(asked, answerer.tokenizer) for answerer in answerers}
    count = len(encoded[answerers[0].name])
    each = 1 if on_text is not None else batch_size
    for start in range(0, count, each):
        batch = range(start, min(start + each, count))
        for answerer in answerers:
            yield from _answer_batch(answerer, batch, encoded[answerer.name], sampling, on_text)


def open_answerers(
    sources: Sequence[str], *, base: str | None = None, quantization: str | None = None, device: str = "auto"
) -> list[Answerer]:
    """Load the sources; adapters of one base share it. Refuses an adapter whose keys don't fit its base."""
    if not sources:
        raise ModelError("there is nothing to ask", "Name a run, an adapter, a merged folder, a hub id or 'base'.")
    place = named_device(device)
    folders = {source: adapter_folder(source) for source in sources if source != BASE and holds_adapter(source)}
    if BASE in sources and not folders:
        raise ModelError("'base' is the base of an adapter, and no adapter is named", "Name the model itself.")
    loaded: dict[Model, Any] = {}
    opened: list[tuple[Model, Answerer]] = []
    for number, source in enumerate(sources):
        folder = next(iter(folders.values())) if source == BASE else folders.get(source)
        model = Model(name=source) if folder is None else _base_of(folder, base, quantization)
        ready = ready_tokenizer(model, _own_tokenizer(folder))
        if model not in loaded:
            found = load_base(model, ready.tokenizer, device=place.device, precision=place.precision.value)
            loaded[model] = found.model
        stops = {*ready.stop_ids, *(stop_ids_in(folder) if folder else ())}
        adapter = None
        if folder is not None and source != BASE:
            adapter = f"adapter-{number}"
            check_adapter(folder, model_config(hub_arguments(model)))
            loaded[model] = _with_adapter(loaded[model], folder, adapter)
        opened.append((model, Answerer(source, None, adapter, ready.tokenizer, tuple(sorted(stops)))))
    return [replace(answerer, model=loaded[model]) for model, answerer in opened]


def _base_of(folder: Path, base: str | None, quantization: str | None) -> Model:
    """The base of an adapter, quantised as it was trained unless asked otherwise."""
    name = base or adapter_config(folder).base_model_name_or_path
    bits = quantization or read_facts(folder).get("quantization", "none")
    return Model.model_validate({"name": name or "", "quantization": bits})


def encode_questions(asked: Sequence[str] | Rows, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of each question: everything before the answer, the opened assistant turn included."""
    rows = asked if isinstance(asked, Rows) else rows_of_prompts(asked, chat=bool(tokenizer.chat_template))
    data = Data(path=rows.name, special_text="keep")
    renderer, encoder = Renderer(tokenizer, data), Encoder(tokenizer)
    encoded = []
    for ids, learn in encoder.rows([renderer.spans(_with_an_answer(row)) for row in rows.rows]):
        start, _ = last_run(torch.tensor(learn).numpy())
        encoded.append(ids[:start])
    short = [row.number for row, ids in zip(rows.rows, encoded, strict=True) if not ids]
    if short:
        raise DataError(
            f"row {short[0]} asks nothing: all of it is to be learned", "Use rows with a prompt or messages."
        )
    return encoded


def rows_of_prompts(prompts: Sequence[str], *, chat: bool) -> Rows:
    """Prompts as rows: one user turn each, or plain prompts where there is no chat template."""
    shaped = [
        {"messages": [{"role": "user", "content": p}]} if chat else {"prompt": p, "completion": "-"} for p in prompts
    ]
    rows = load_rows([_answered(row) for row in shaped], Data(path="prompts", special_text="keep"))
    refuse(rows.findings)
    return rows


def _answered(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*row["messages"], {"role": "assistant", "content": "-"}]} if "messages" in row else row


def _with_an_answer(row: Row) -> Row:
    """Rows that end with a question get a stand-in for its answer: the renderer looks for what is to be learned."""
    if row.shape == "messages" and row.turns[-1].role != "assistant":
        return replace(row, turns=(*row.turns, Turn("assistant", "-")))
    return row


def _answer_batch(
    answerer: Answerer, batch: range, encoded: Sequence[Sequence[int]], sampling: Sampling, on_text: OnText | None
) -> Iterator[Answer]:
    streamer = None if on_text is None else _Pieces(answerer, batch[0], on_text)
    began = time.monotonic()
    found = answerer.answer([encoded[number] for number in batch], sampling, streamer)
    seconds = (time.monotonic() - began) / len(batch)
    for number, ids in zip(batch, found, strict=True):
        stopped = bool(ids) and ids[-1] in answerer.stop_ids
        text = answerer.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
        yield Answer(answerer.name, number, str(text), tuple(ids), stopped, seconds)


class _Pieces(TextStreamer):  # type: ignore[misc]
    """transformers' streamer, which holds text back until a word is whole, with another way out than print."""

    def __init__(self, answerer: Answerer, question: int, on_text: OnText) -> None:
        super().__init__(answerer.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.name, self.question, self.on_text = answerer.name, question, on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(self.name, self.question, text)


def _with_adapter(model: Any, folder: Path, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about tied weights; missing keys were refused before
        if not isinstance(model, PeftModel):
            return PeftModel.from_pretrained(model, folder, adapter_name=name).eval()
        model.load_adapter(folder, name)
    return model.eval()


def _own_tokenizer(folder: Path | None) -> PreTrainedTokenizerBase | None:
    return load_saved_tokenizer(folder) if folder is not None and has_tokenizer(folder) else None


def _until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in stops:
            return ids[: place + 1]
    return ids
