"""Encoded rows on disk, under a fingerprint of all that can change them. No pickle; a damaged file counts as absent."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.rows import Rows
from crosstune.data.template import DATE
from crosstune.errors import DataError, Finding, Place
from crosstune.recipe.sections import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 2  # raise it when the same input gives other ids or findings


def fingerprint_of(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, max_tokens: int) -> str:
    """SHA-256 over the rows, the tokenizer's whole state, the template and every option that changes ids or targets."""
    digest = hashlib.sha256()
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    options = {
        "version": _VERSION, "rows": rows.fingerprint, "template": tokenizer.chat_template, "date": DATE.isoformat(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"},
        "max_tokens": max_tokens, "learn": data.learn, "answer_after": data.answer_after,
        "special_text": data.special_text,
    }  # fmt: skip
    digest.update(vocabulary.encode("utf-8", "surrogatepass"))
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()


def read_cache(
    file: Path, fingerprint: str
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], list[Finding]] | None:
    try:
        with np.load(file, allow_pickle=False) as stored:
            if stored["fingerprint"].item() != fingerprint:
                return None
            findings = [_finding(fields) for fields in json.loads(stored["findings"].item())]
            return stored["ids"], stored["learn"], stored["starts"], findings
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # absent, cut short or of another version: encode anew


def write_cache(
    file: Path, fingerprint: str, ids: NDArray[Any], learn: NDArray[Any], starts: NDArray[Any], findings: list[Finding]
) -> None:
    said = json.dumps([asdict(finding) for finding in findings])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "wb") as out:
            np.savez(
                out, ids=ids, learn=learn, starts=starts, findings=np.array(said), fingerprint=np.array(fingerprint)
            )
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(file)
    except OSError as error:
        raise DataError(
            f"the token cache {str(file.parent)!r} can't be written: {error}",
            "Free some disk, or choose another folder.",
        ) from None


def _finding(fields: dict[str, Any]) -> Finding:
    return Finding(**{**fields, "rows": tuple(fields["rows"]), "where": Place(**fields["where"])})
