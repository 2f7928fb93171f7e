"""Anything at all as input: a clear error and exit code 2, never a traceback."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstune import cli
from crosstune.data.lint import lint
from tests.tiny import CASES

CHAT = (CASES / "chat24.jsonl").read_bytes()
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", "")


def png(rng: Random) -> bytes:
    """One grey pixel and noise."""
    chunk = b"IHDR" + bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + chunk + zlib.crc32(chunk).to_bytes(4, "big") + rng.randbytes(200)


def zipped(rng: Random) -> bytes:
    """A zip archive that holds the rows."""
    import io

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("rows.jsonl", CHAT)
    return out.getvalue()


FORMS: dict[str, Callable[[Random], bytes]] = {
    "random": lambda rng: rng.randbytes(rng.randrange(1, 5000)),
    "zeros": lambda rng: bytes(rng.randrange(1, 5000)),
    "utf16": lambda rng: CHAT.decode().encode("utf-16"),
    "utf16-without-mark": lambda rng: CHAT.decode().encode(rng.choice(["utf-16-le", "utf-16-be"])),
    "utf32": lambda rng: CHAT.decode().encode("utf-32"),
    "gzip": lambda rng: gzip.compress(CHAT),
    "bzip2": lambda rng: bz2.compress(CHAT),
    "xz": lambda rng: lzma.compress(CHAT),
    "zip": zipped,
    "png": png,
    "jpeg": lambda rng: b"\xff\xd8\xff\xe0\0\x10JFIF" + rng.randbytes(500),
    "pdf": lambda rng: b"%PDF-1.7\n" + rng.randbytes(500),
    "sqlite": lambda rng: b"SQLite format 3\0" + rng.randbytes(500),
    "html": lambda rng: b"<!DOCTYPE html><html><body>404</body></html>\n",
    "yaml": lambda rng: b"- one\n- two\n",
    "prose": lambda rng: b"It was a dark and stormy night.\nThe rain fell.\n",
    "brackets": lambda rng: b"[" * rng.randrange(1, 200_000),
    "braces": lambda rng: b'{"a":' * rng.randrange(1, 100_000),
    "digits": lambda rng: b'{"text": ' + b"9" * rng.randrange(4301, 20_000) + b"}\n",
    "empty": lambda rng: b"",
    "line ends": lambda rng: b"\r\n" * rng.randrange(1, 9),
    "a torn parquet": lambda rng: b"PAR1" + rng.randbytes(rng.randrange(300)),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_holds_no_rows_is_a_clear_error(form: str, suffix: str, tmp_path: Path) -> None:
    for seed in range(3):
        file = tmp_path / f"rows{suffix}"
        file.write_bytes(FORMS[form](Random(seed)))
        report = lint(file)
        if form == "prose" and suffix in (".csv", ".tsv"):
            assert report.exit_code == 2 or report.findings  # a CSV file of one column
            continue
        assert report.exit_code == 2, report.summary()
        assert all(finding.message and finding.fix for finding in report.errors)
        assert all(len(finding.message) < 1000 for finding in report.errors)


@pytest.mark.parametrize("form", ["random", "utf16", "gzip", "png", "brackets", "empty"])
def test_the_command_exits_with_2(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(FORMS[form](Random(1)))
    assert cli.main(["lint", str(file), "--json"]) == 2
    (finding, *_) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert finding["severity"] == "error" and finding["fix"]
    assert cli.main(["lint", str(tmp_path)]) == 2


def test_a_directory_a_missing_file_and_a_device(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(CHAT)
    folder = lint(tmp_path)
    assert folder.exit_code == 2 and "rows.jsonl" in folder.errors[0].fix
    missing = lint(tmp_path / "row.jsonl")
    assert missing.exit_code == 2 and "rows.jsonl" in missing.errors[0].fix, "the nearest name is told"
    assert lint("/dev/null").exit_code == 2


@pytest.mark.parametrize("cut", range(1, len(CHAT), 37))
def test_a_truncated_file_is_right_up_to_the_cut(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(CHAT[:cut])
    report = lint(file)
    whole = CHAT[:cut].endswith(b"\n") or CHAT[cut : cut + 1] == b"\n"  # cut where a line ends
    assert report.exit_code == (0 if whole else 2)
    if not whole:
        (finding,) = report.errors
        assert (finding.code, finding.where.line) == ("json-syntax", CHAT[:cut].count(b"\n") + 1)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), suffix=st.sampled_from(SUFFIXES))
def test_no_bytes_raise(data: bytes, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(data)
    assert lint(file).exit_code in (0, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "x"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.sampled_from(
    ["messages", "conversations", "text", "prompt", "completion", "instruction", "input", "output", "label", "tools"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(KEYS, JSON, max_size=4) | JSON, min_size=1, max_size=6))
def test_no_json_raises(rows: list[object], tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = lint(file)
    assert report.exit_code in (0, 2)
    if not isinstance(rows[0], list):  # else the file begins with a bracket: one JSON list
        assert all(1 <= row <= len(rows) for finding in report.findings for row in finding.rows)
    assert report.to_json_lines().count("\n") == len(report.findings)
