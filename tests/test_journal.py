"""The journal: what was appended durably is there after any crash, and damage is never read as something else."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstune.errors import RunError
from crosstune.interrupt import Interrupted
from crosstune.store.journal import Journal

CHILD = """
import os, sys
from pathlib import Path
from crosstune.store.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
for number in range(10**9):
    journal.append("tick", durable=number % 3 == 0, number=number, text="x" * (number % 50))
    print(number, flush=True)
"""


def fill(path: Path, count: int = 5) -> bytes:
    journal = Journal.open(path)
    for number in range(count):
        journal.append("tick", number=number)
    journal.close()
    return path.read_bytes()


def numbers(path: Path) -> list[int]:
    return [event["number"] for event in Journal.read(path).events]


def test_every_line_is_json_and_the_first_holds_the_version(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in fill(tmp_path / "j").splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("version") for line in lines] == [1, None, None, None, None]


def test_torn_last_line_is_forgiven_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = fill(path)
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in range(last + 1, len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal.open(path)
        assert [event["number"] for event in journal.events] == [0, 1, 2, 3]
        assert journal.cut == f"line 5 (byte {last}) was not finished"
        journal.append("tick", number=9)
        journal.close()
        assert numbers(path) == [0, 1, 2, 3, 9]


def test_zeros_after_a_power_cut_belong_to_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(fill(path) + b'{"event": "ti' + b"\0" * 4000)
    assert numbers(path) == [0, 1, 2, 3, 4]


@given(bit=st.integers(min_value=0, max_value=10**6))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_is_never_read_as_an_event(bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("flip") / "j"
    whole = fill(path)
    bit %= 8 * len(whole)
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    line = whole.count(b"\n", 0, bit // 8) + 1
    try:
        found = numbers(path)
    except RunError as error:
        assert f"line {line} (byte " in str(error)
        assert line < 5 or bytes(flipped).count(b"\n") > 5  # a line break made in mid-line leaves two halves
    else:
        assert line >= 4  # without its line break, line 4 is one with line 5: the last, torn line
        assert found == [0, 1, 2, 3][: line - 1]


def test_torn_middle_is_refused_with_its_position_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    lines = fill(path).splitlines(keepends=True)
    torn = b"".join([*lines[:2], lines[2][:20] + b"\n", *lines[3:]])
    path.write_bytes(torn)
    with pytest.raises(RunError, match=rf"line 3 \(byte {len(lines[0] + lines[1])}\) is damaged"):
        Journal.open(path)
    assert path.read_bytes() == torn


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j"
    body = b'{"event": "created", "version": 99, "at": 0}'
    path.write_bytes(body[:-1] + b', "crc": "%08x"}\n' % zlib.crc32(body))
    with pytest.raises(RunError, match="journal version 99, and this crosstune reads version 1"):
        Journal.open(path)


def test_numbers_come_back_exactly_and_infinity_is_seen(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    journal.append(
        "scores", loss=0.1 + 0.2, tiny=5e-324, nan=math.nan, low=-math.inf, many=np.float64([1 / 3]), n=np.int64(7)
    )
    journal.close()
    event = Journal.read(tmp_path / "j").events[0]
    assert (event["loss"], event["tiny"], event["nan"], event["low"]) == (0.1 + 0.2, 5e-324, "nan", "-inf")
    assert (event["many"], event["n"]) == ([1 / 3], 7)


def test_a_clock_that_goes_back_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    for number, now in enumerate((2e9, 1e9, 0.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        journal = Journal.open(path)
        journal.append("tick", number=number)
        journal.close()
    assert numbers(path) == [0, 1, 2]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_the_journal_as_it_was(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    before = fill(path)
    journal = Journal.open(path)
    real_write, room = os.write, [10]

    def write_until_full(handle: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        return real_write(handle, data[: room.pop()]) + (room.append(0) or 0)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, write_until_full if call == "write" else full)
        with pytest.raises(RunError, match=r"No space left on device\n  Free some space"):
            journal.append("tick", durable=True, number=5, text="y" * 100)
    assert path.read_bytes() == before
    journal.append("tick", durable=True, number=6)
    journal.close()
    assert numbers(path) == [0, 1, 2, 3, 4, 6]


def half_then(error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """A line of which the first half is written."""
    write, left = os.write, [1]

    def stopped(handle: int, data: memoryview) -> int:
        if not left:
            raise error
        return write(handle, data[: len(data) // 2 * left.pop()])

    patch.setattr(os, "write", stopped)


def test_an_interrupt_in_mid_line_leaves_no_torn_line_before_the_event_that_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "j")
    journal = Journal.open(tmp_path / "j")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        half_then(Interrupted(15), patch)
        journal.append("tick", number=5)
    journal.append("tick", number=6)
    assert numbers(tmp_path / "j") == [0, 1, 2, 3, 4, 6]


def test_after_a_torn_line_that_cannot_be_taken_back_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "j")
    journal = Journal.open(tmp_path / "j")

    def broken(handle: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        half_then(OSError(28, "No space left on device"), patch)
        patch.setattr(os, "ftruncate", broken)
        journal.append("tick", number=5)
    with pytest.raises(RunError, match="the line before could not be written"):
        journal.append("closed")
    journal.close()
    assert numbers(tmp_path / "j") == [0, 1, 2, 3, 4]
    Journal.open(tmp_path / "j").append("tick", number=6)
    assert numbers(tmp_path / "j") == [0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize("durable", [False, True])
def test_a_deleted_journal_is_noticed_at_the_next_event(durable: bool, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j")
    journal.append("tick", durable=True)
    (tmp_path / "j").unlink()
    with pytest.raises(RunError, match="vanished"):
        journal.append("tick", durable=durable)


def test_killed_at_random_moments_all_that_was_reported_durable_is_there(tmp_path: Path) -> None:
    path, chance = tmp_path / "j", random.Random(0)
    for _ in range(5):
        path.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        seen = -1
        for _ in range(chance.randrange(1, 400)):
            seen = int(child.stdout.readline())
        child.kill()
        child.wait()
        found = numbers(path)
        assert found == list(range(len(found)))
        assert len(found) > seen
