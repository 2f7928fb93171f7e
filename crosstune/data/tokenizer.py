"""The tokenizer of a base model, made ready: chat template, a padding token that stops nothing, all stop tokens.

No token is ever added, so the embedding keeps its size. Transformers is imported inside functions: it may bring torch.
"""

from __future__ import annotations

import copy
import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.data.gguf_once import parsed_once
from crosstune.data.template import ChatTemplate
from crosstune.errors import Finding, MissingExtra, ModelError, first_line, hub_fix
from crosstune.recipe.sections import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Control tokens that may pad, the best first: made for it, kept back for later use, "unknown", then whatever is left.
_PAD_LIKE = (
    re.compile(r"finetune.*pad|^[<\[|]*pad[|>\]]*$", re.IGNORECASE),
    re.compile(r"^(?!.*(image|vision|video|audio|speech)).*pad", re.IGNORECASE),
    re.compile(r"reserved|unused|extra_?id|extra_?\d|placeholder|dummy", re.IGNORECASE),
)

NO_LIMIT = 2**31  # tokens


@dataclass(frozen=True)
class ReadyTokenizer:
    """A tokenizer with its padding and stop tokens, and what there is to say about them."""

    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    stop_ids: tuple[int, ...]
    findings: tuple[Finding, ...]


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub id, folder or .gguf file with padding token and chat template set."""
    return ready_tokenizer(model).tokenizer


def ready_tokenizer(
    model: Model, tokenizer: PreTrainedTokenizerBase | None = None, *, stops: Iterable[int] | None = None
) -> ReadyTokenizer:
    """Load the tokenizer, or take the one given (a copy is changed), and set template, padding and stop tokens.

    `stops`: the generation config's stop tokens, where the model is in memory; else they are read where it lies.
    """
    tokenizer = _from_pretrained(model) if tokenizer is None else copy.deepcopy(tokenizer)
    if model.chat_template:
        tokenizer.chat_template = _template_text(model.chat_template)
    stop_ids = find_stop_ids(tokenizer, generation_stop_ids(model) if stops is None else stops)
    pad, findings = choose_pad(tokenizer, stop_ids, asked=model.pad_token)
    tokenizer.pad_token = pad
    return ReadyTokenizer(tokenizer, int(tokenizer.get_vocab()[pad]), stop_ids, tuple(findings))


def find_stop_ids(tokenizer: PreTrainedTokenizerBase, more: Iterable[int] = ()) -> tuple[int, ...]:
    """The tokenizer's EOS, `more` (the generation config's), and what ends assistant turns in the template."""
    ids = [tokenizer.eos_token_id, *more]
    if tokenizer.chat_template:
        with suppress(ModelError):  # a template that renders nothing is reported where rows are rendered
            ids.append(_control_id(tokenizer, ChatTemplate(tokenizer).end))
    return tuple(sorted({int(i) for i in ids if i is not None}))


def choose_pad(
    tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, asked: str | None = None
) -> tuple[str, list[Finding]]:
    """The text of a padding token that exists and stops nothing, and why it was chosen. `asked` is taken as it is."""
    if asked is not None:
        return asked, _check_asked(tokenizer, stop_ids, asked)
    own = tokenizer.pad_token_id
    if own is not None and own not in stop_ids:
        return str(tokenizer.pad_token), []
    chosen = _pad_candidate(tokenizer, stop_ids)
    if chosen is None:
        return str(tokenizer.eos_token), [
            Finding("pad-is-stop-token", "warning", "no control token but the stop tokens can pad",
                    "Nothing needs doing: padding is never a target here, whatever its id.")
        ]  # fmt: skip
    number = tokenizer.convert_tokens_to_ids(chosen)
    # Many tokenizers come so (SmolLM2 pads with its stop token): put right here, it hurts no more, hence a note.
    why = "the tokenizer has no padding token" if own is None else f"its own, {tokenizer.pad_token} ({own}), ends texts"
    return chosen, [
        Finding("pad-chosen", "note", f"{chosen} ({number}) pads, for {why}", "Set model.pad_token for another.")
    ]


def _check_asked(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], asked: str) -> list[Finding]:
    number = tokenizer.get_vocab().get(asked)
    if number is None:
        near = difflib.get_close_matches(
            asked, [str(t) for t in tokenizer.added_tokens_decoder.values()], n=3, cutoff=0.4
        )
        raise ModelError(f"model.pad_token {asked!r} is not in the vocabulary of {tokenizer.name_or_path!r}; "
                         "no token is added",
                         f"Take one that is there{', such as ' + ', '.join(near) if near else ''}, or leave it "
                         "out.")  # fmt: skip
    if number not in stop_ids:
        return []
    return [
        Finding("pad-is-stop-token", "warning", f"model.pad_token {asked!r} ({number}) is a stop token",
                "Leave model.pad_token out. Training stays right (padding is masked by place, not by id), but "
                "other tools "
                "may mask every stop token of the exported tokenizer.")
    ]  # fmt: skip


def _pad_candidate(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> str | None:
    taken = {*stop_ids, tokenizer.bos_token_id}
    used = str(tokenizer.chat_template or "")
    control = [
        str(token)
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and number not in taken and str(token) not in used
    ]
    for pattern in _PAD_LIKE:
        matches = [text for text in control if pattern.search(text)]
        if matches:
            # Of reserved tokens the last: the first ones are given a meaning in later models.
            return matches[-1] if "reserved" in matches[-1] else matches[0]
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in taken:
        return str(tokenizer.unk_token)
    return control[-1] if control else None


def _control_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    return tokenizer.get_vocab().get(text) if text else None


def _template_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template {path!r} can't be read: {error}", "Give the path of a Jinja template."
        ) from None


# --- files and hub -------------------------------------------------------------------------------------------------


def _from_pretrained(model: Model) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = model.tokenizer or model.name
    place, options = _place(name, model)
    try:
        with parsed_once():
            return AutoTokenizer.from_pretrained(place, **options)
    except ImportError as error:
        if "gguf" in options.get("gguf_file", ""):
            raise MissingExtra("gguf", "demo") from None
        raise ModelError(
            f"the tokenizer of {name!r} needs a package that isn't here: {error}", "Install that package."
        ) from None
    # The tokenizers library raises bare `Exception` for a damaged tokenizer.json (0.23: no class of its own).
    except Exception as error:
        fix = "Check model.name (or model.tokenizer): a folder with tokenizer.json, a hub id, or a .gguf file."
        raise ModelError(
            f"the tokenizer of {name!r} can't be loaded: {first_line(error)}", hub_fix(error, fix)
        ) from None


def _place(name: str, model: Model) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is to be given: a folder or hub id, and the GGUF file in it."""
    path = Path(name)
    check = f"Check model.{'tokenizer' if name == model.tokenizer else 'name'}."
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            return str(path.parent), options | {"gguf_file": path.name}
        if name.count("/") == 2 and not name.startswith((".", "/")):
            return name.rpartition("/")[0], options | {"gguf_file": path.name, "revision": model.revision}
        raise ModelError(f"the model file {name!r} does not exist", check)
    if path.exists():
        if path.is_file():
            raise ModelError(
                f"the model {name!r} is a file, and no .gguf file", "Give a folder, a hub id or a .gguf file."
            )
        return name, options
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"the model folder {name!r} does not exist", check)
    return name, options | {"revision": model.revision}


def generation_stop_ids(model: Model) -> list[int]:
    """Stop tokens of the model's generation config; none where it has no such file."""
    from transformers import GenerationConfig

    place, options = _place(model.name, model)
    if "gguf_file" in options:
        return []
    quiet = logging.getLogger("transformers.generation.configuration_utils")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns of sampling settings, which are no concern of training
    try:
        ids = GenerationConfig.from_pretrained(place, revision=options.get("revision") or "main").eos_token_id
    except (OSError, ValueError):
        return []  # a model without generation_config.json
    finally:
        quiet.setLevel(level)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def longest_row(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest row that a model takes: its positions, or what the tokenizer says if that is less."""
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return min(int(positions or NO_LIMIT), int(tokenizer.model_max_length), NO_LIMIT)
