"""Markers of chat templates in the text of rows: the tokenizer's own control tokens, and other models' formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.text import Parts, excerpt
from crosstune.data.load import Row
from crosstune.errors import Finding, Severity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Format:
    """How one family writes conversations: told by all of `proof` together; `markers` are what is named."""

    name: str
    proof: tuple[str, ...]
    markers: tuple[str, ...]
    plain: bool = False  # made of ordinary words: fine in plain text, as Alpaca's headers are for base models


FORMATS = (
    Format("Llama-2 or Mistral", ("[INST]", "[/INST]"), ("<s>", "[INST]", "<<SYS>>", "[/INST]", "</s>")),
    Format("ChatML", ("<|im_start|>",), ("<|im_start|>", "<|im_end|>")),
    Format("ChatML", ("<|im_end|>",), ("<|im_start|>", "<|im_end|>")),
    Format("Llama-3", ("<|start_header_id|>",), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    Format("Llama-3", ("<|eot_id|>",), ("<|begin_of_text|>", "<|eot_id|>")),
    Format("Llama-4", ("<|header_start|>",), ("<|header_start|>", "<|header_end|>", "<|eot|>")),
    Format("Gemma", ("<start_of_turn>",), ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    Format("Zephyr or Phi", ("<|user|>", "<|assistant|>"), ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    Format("Command R", ("<|START_OF_TURN_TOKEN|>",), ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>")),
    Format("DeepSeek", ("<｜User｜>", "<｜Assistant｜>"), ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")),
    Format("GPT-OSS", ("<|start|>", "<|message|>"), ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")),
    Format("GPT", ("<|endoftext|>",), ("<|startoftext|>", "<|endoftext|>")),
    Format("Alpaca", ("### Instruction:", "### Response:"), ("### Instruction:", "### Input:", "### Response:"), True),
)  # fmt: skip
ALPACA_BEGINS = "Below is an instruction"


class Marks:
    """Knows the marks of one tokenizer, or of none. Without a tokenizer any format may be the model's own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None, *, keep: bool = False) -> None:
        self.known = tokenizer is not None
        self.keep = keep  # data.special_text: keep
        own: set[str] = set()
        template, self.bos, self.has_template = "", "", False
        if tokenizer is not None:
            own = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            own |= set(tokenizer.all_special_tokens)
            template = str(tokenizer.chat_template or "")
            self.bos, self.has_template = str(tokenizer.bos_token or ""), bool(template)
        own.discard("")
        self.special = re.compile("|".join(sorted(map(re.escape, own), key=len, reverse=True))) if own else None
        self.formats = [f for f in FORMATS if not any(mark in own for mark in f.proof)]
        # Formats of ordinary text that the model's own template is made of (Llama-2's [INST] is no special token).
        self.applied = [f for f in self.formats if all(mark in template for mark in f.proof)]
        self.formats = [f for f in self.formats if f not in self.applied]
        starts = {text[:2] for text in own} | {form.proof[0] for form in FORMATS}
        self.needles = tuple(sorted(starts))

    def may_find(self, text: str) -> bool:
        """Whether `check` could find anything in this text."""
        return any(needle in text for needle in self.needles)

    def check(self, row: Row, parts: Parts) -> Iterable[Finding]:
        """All findings of one row."""
        return [
            *self.check_double_bos(row, parts),
            *self.check_special_tokens(row, parts),
            *self.check_foreign_template(row, parts),
        ]

    def check_double_bos(self, row: Row, parts: Parts) -> Iterator[Finding]:
        """Plain text that brings its own beginning-of-text token."""
        if self.bos and not self.keep and row.shape != "messages" and parts[0][2].startswith(self.bos):
            where = replace(row.where, field=parts[0][0])
            yield FAULTS["double-bos"].found(f"{parts[0][0]} begins with {self.bos}", [row.number], where)

    def check_special_tokens(self, row: Row, parts: Parts) -> Iterator[Finding]:
        """Text that spells a control token of this tokenizer."""
        if self.keep:
            return
        for field, _, text in parts:
            begin = len(self.bos) if field in ("text", "prompt") and self.bos and text.startswith(self.bos) else 0
            found = list(dict.fromkeys(self.special.findall(text, begin))) if self.special else []
            for form in self.applied:
                if all(mark in text for mark in form.proof):
                    found += [mark for mark in form.markers if mark in text and mark not in found]
            if found:
                at = text.find(found[0], begin)
                message = f"{field} spells {_named(found)}: {excerpt(text, at, width=60)!r}"
                yield FAULTS["special-token-in-content"].found(message, [row.number], replace(row.where, field=field))

    def check_foreign_template(self, row: Row, parts: Parts) -> Iterator[Finding]:
        """Text in the chat format of another model."""
        for field, _, text in parts:
            for form in self.formats:
                if not all(mark in text for mark in form.proof):
                    continue
                found = sorted((mark for mark in form.markers if mark in text), key=text.index)
                message = f"{field} is written in the format of {form.name}: {_named(found)}"
                fix = "" if self.known else "Write the rows as messages. Name the model (--model) for a closer look."
                severity, where = self._severity(form, row, text, found), replace(row.where, field=field)
                yield FAULTS["foreign-template"].found(message, [row.number], where, fix=fix, severity=severity)
                break

    def _severity(self, form: Format, row: Row, text: str, found: Sequence[str]) -> Severity:
        """An error where a text begins in the format; less where it may only speak of it, or no model is named."""
        begins = text.lstrip().startswith((*found, ALPACA_BEGINS))
        if form.plain:
            # Base models are trained on Alpaca's headers as ordinary text, to good effect. With a chat template at
            # hand, or inside its turns, they are a second template.
            second = begins if row.shape == "messages" else self.has_template
            return "warning" if second else "note"
        if not begins:
            return "note" if row.shape == "messages" else "warning"
        return "error" if self.known else "warning"


def _named(marks: Sequence[str]) -> str:
    return ", ".join(repr(mark) for mark in marks[:8]) + (f" and {len(marks) - 8} more" if len(marks) > 8 else "")
