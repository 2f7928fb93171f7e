"""A row → `Span`s: text that is encoded apart, and whether the model is to learn it.

Cuts lie where inference would cut: what the prompt holds is one text, what the model has to say is another.
Knows nothing of ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from crosstune.data.control import MARK, MARKED, map_strings, special_pattern
from crosstune.data.rows import Row, Turn
from crosstune.data.template import ChatTemplate, RowError, settings_of
from crosstune.errors import DataError, Finding
from crosstune.recipe.sections import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Span:
    """`literal`: text that spells a control token stays ordinary characters."""

    text: str
    learn: bool
    literal: bool = False


class Renderer:
    """Renders the rows of one data set with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
        self.tokenizer, self.data = tokenizer, data
        self.keep = data.special_text == "keep"
        self.special = special_pattern(tokenizer)
        self.bos = _bos_that_is_added(tokenizer)
        self.eos = str(tokenizer.eos_token or "")

    @property
    def template_used(self) -> bool:
        """Whether a conversation has been rendered."""
        return "template" in self.__dict__

    @cached_property
    def template(self) -> ChatTemplate:
        """Probed at the first conversation; raises `ModelError` if the tokenizer has no template."""
        return ChatTemplate(self.tokenizer)

    def spans(self, row: Row) -> list[Span]:
        """The row's spans, in order; raises `RowError` where the template refuses the row."""
        if row.shape == "messages":
            return list(self._conversation(row))
        if row.shape == "prompt":
            learn = self.data.learn == "all"
            return self._plain([Span(row.prompt, learn), Span(row.completion, True)])
        return self._plain(self._text(row))

    def ignored(self, row: Row, key: str) -> bool:
        """Whether the template writes the same when `key` is taken from the turns."""
        less = [replace(t, extra={k: v for k, v in t.extra.items() if k != key}) for t in row.turns]
        settings = settings_of(row)
        try:
            return self.template.render(row.turns, opened=False, settings=settings) == self.template.render(
                less, opened=False, settings=settings
            )
        except DataError:
            return False

    def _text(self, row: Row) -> list[Span]:
        if self.data.answer_after and self.data.learn != "all":
            at = row.text.rfind(self.data.answer_after)
            if at < 0:
                return [Span(row.text, False)]
            cut = at + len(self.data.answer_after)
            return [Span(row.text[:cut], False), Span(row.text[cut:], True)]
        if self.data.learn == "assistant":
            raise RowError(
                f"row {row.number} is plain text: it has no assistant turns, which data.learn asks for",
                "Set data.answer_after to the text that stands before each answer, or data.learn: "
                "all.", "no-turns", row.number,
            )  # fmt: skip
        return [Span(row.text, True)]

    def _plain(self, spans: list[Span]) -> list[Span]:
        """One BOS before, if the tokenizer puts one before plain text; one EOS after, as TRL does."""
        learn_end = spans[-1].learn
        spans = [replace(span, literal=self._spells_control(span.text)) for span in spans if span.text]
        if self.bos and not (spans and spans[0].text.startswith(self.bos) and not spans[0].literal):
            spans.insert(0, Span(self.bos, False))
        ends = spans and spans[-1].text.endswith(self.eos) and not spans[-1].literal
        if self.eos and not ends:
            spans.append(Span(self.eos, learn_end))
        return spans

    def _spells_control(self, text: str) -> bool:
        return bool(self.keep and self.special is not None and self.special.search(text))

    def _conversation(self, row: Row) -> Iterator[Span]:
        if not row.turns:
            return
        turns, settings = row.turns, settings_of(row)
        hidden: list[str] = []
        if self.keep and self.special is not None:
            turns, settings = self._hide(turns, hidden), map_strings(settings, lambda text: self._hidden(text, hidden))
        try:
            text, regions = self.template.regions(row, turns, settings)
        except RowError:
            raise
        except DataError as error:
            raise RowError(f"row {row.number}: {error.problem}", error.fix, "template-error", row.number) from None
        if self.data.learn == "all":
            yield from self._restored(text, True, hidden)
            return
        done = 0
        for region in regions:
            yield from self._restored(text[done : region.start], False, hidden)
            yield from self._restored(text[region.start : region.end], True, hidden)
            done = region.end
        yield from self._restored(text[done:], False, hidden)

    def _hide(self, turns: tuple[Turn, ...], hidden: list[str]) -> tuple[Turn, ...]:
        """Control tokens in content become marks before rendering, so that they can be told from the template's own."""
        return tuple(
            replace(
                t,
                content=self._hidden(t.content, hidden),
                extra=map_strings(t.extra, lambda text: self._hidden(text, hidden)),
            )
            for t in turns
        )

    def _hidden(self, text: str, hidden: list[str]) -> str:
        assert self.special is not None

        def mark(match: object) -> str:
            hidden.append(match.group())  # type: ignore[attr-defined]
            return MARK.format(len(hidden) - 1)

        return self.special.sub(mark, text)

    def _restored(self, text: str, learn: bool, hidden: list[str]) -> Iterator[Span]:
        """Text between two control tokens that holds a mark is one literal span; the rest stays whole."""
        if not hidden or not MARKED.search(text) or self.special is None:
            if text:
                yield Span(text, learn)
            return
        plain, done = "", 0
        pieces = [(m.start(), m.end()) for m in self.special.finditer(text)]
        for start, end in [*pieces, (len(text), len(text))]:
            between = text[done:start]
            if MARKED.search(between):
                if plain:
                    yield Span(plain, learn)
                yield Span(MARKED.sub(lambda m: hidden[int(m.group(1))], between), learn, literal=True)
                plain = ""
            else:
                plain += between
            plain += text[start:end]
            done = end
        if plain:
            yield Span(plain, learn)


def _bos_that_is_added(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the BOS token if the tokenizer puts it before plain text, else ""."""
    ids = tokenizer("a")["input_ids"]
    return (
        str(tokenizer.bos_token) if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else ""
    )


def template_findings(renderer: Renderer, *, conversations: bool) -> tuple[Finding, ...]:
    """What probing the chat template showed; nothing where no row is a conversation."""
    return tuple(renderer.template.findings) if conversations else ()
