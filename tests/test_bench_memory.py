"""The memory bench: what is predicted anew is what a rehearsal says, and its table is the page's."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.memory.grid import MODELS, grid, named
from bench.memory.predict import again
from bench.memory.table import table
from crosstune.memory.gpus import MIB, find_gpu
from crosstune.train.rehearse import rehearse

ROOT = Path(__file__).parent.parent


def test_predictions_made_anew_are_what_a_rehearsal_says_beside_the_same_readings(tmp_path):
    name, settings = next(grid(["tiny"], "blind"))
    machine, file = find_gpu("h200"), tmp_path / "grid.jsonl"
    env = {"kind": "env", "machine": asdict(machine), "expandable": True}
    cell = {"kind": "cell", **named(name, settings), "evaluate": 512, "outside": 5, "allocated": 7, "dry_allocated": 1}
    file.write_text(json.dumps(env) + "\n" + json.dumps(cell) + "\n")
    again(file, ["tiny"], 1)
    kept, found = map(json.loads, file.read_text().splitlines())
    shown = rehearse(MODELS[name], settings, machine, evaluate_tokens=512).replay(expandable=True)
    assert kept == json.loads(json.dumps(env)) and found["allocated"] == 7
    assert (found["dry_allocated"], found["dry_reserved"]) == (shown.peak_allocated, shown.peak_reserved)


@pytest.mark.parametrize("words", ["1b none 1x1x8192", "1b int8 1x4x2048"])
def test_rehearsed_reserved_bytes_are_those_an_h200_showed(words):
    """To less than a step of an expandable segment. Both change if kernels' temporaries come in another order."""
    cells = {}
    for name, settings in grid(["1b"], "all"):
        size = f"{settings.lanes}x{settings.micro_batch}x{settings.tokens}"
        cells[f"{name} {settings.quantization} {size}"] = named(name, settings), settings
    label, settings = cells[words]
    lines = map(json.loads, (ROOT / "bench" / "memory_h200.jsonl").read_text().splitlines())
    (read,) = (line for line in lines if line["kind"] == "cell" and label.items() <= line.items())
    shown = rehearse(MODELS["1b"], settings, find_gpu("h200"), evaluate_tokens=read["evaluate"])
    assert abs(shown.replay(expandable=True).peak_reserved - read["reserved"]) < 20 * MIB


def test_the_table_has_a_line_for_every_cell_and_the_pages_medians(capsys):
    file = ROOT / "bench" / "memory_h200.jsonl"
    table(str(file))
    printed = capsys.readouterr().out
    medians = {float(found) for found in re.findall(r"median +(\S+)%", printed)}
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    written = re.findall(r"^\| (?:rehearsal|closed form), .*?\| ([+-]\d+\.\d\d)%", page, re.MULTILINE)
    assert len(written) == 5 and medians == {float(found) for found in written}
    read = sum(bool(json.loads(line).get("allocated")) for line in file.read_text().splitlines()[1:])
    assert len(re.findall(r"^(?:1b|8b|qwen2-1.5b) ", printed, re.MULTILINE)) == read
