"""What was missed, and by how much: the table of a file of lines."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from crosstune.memory.gpus import MIB


def table(path: str) -> None:
    """The misses, cell by cell and in all."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    cells = [line for line in lines if line["kind"] == "cell" and line.get("allocated")]
    print(f"{'cell':52} {'allocated':>10} {'dry':>7} {'closed':>7}  {'reserved':>9} {'dry':>7}", end="  ")
    print(f"{'used':>8} {'dry':>7} {'closed':>7}")
    pairs = (("allocated", "dry"), ("allocated", "closed"), ("reserved", "dry"), ("used", "dry"), ("used", "closed"))
    misses: dict[str, list[float]] = {}
    for cell in cells:
        width = f"{cell['lanes']}x{cell['rows']}x{cell['tokens']} n{cell['checkpointed']} r{cell['rank']}"
        row = []
        for real, tier in pairs:
            said = f"{tier}_{real}"
            row.append(100 * (cell[said] / cell[real] - 1))
            misses.setdefault(said, []).append(row[-1])
        width += " graphs" * cell["recorded"] + " copies" * cell["copies"]
        name = f"{cell['model']} {cell['quantization']} {width}"
        print(f"{name:52} {cell['allocated'] / MIB:10.0f} {row[0]:6.2f}% {row[1]:6.2f}%", end="  ")
        print(f"{cell['reserved'] / MIB:9.0f} {row[2]:6.2f}%", end="  ")
        print(f"{cell['used'] / MIB:8.0f} {row[3]:6.2f}% {row[4]:6.2f}%")
    for said, found in misses.items():
        print(f"{said:18} median {statistics.median(found):6.2f}%, from {min(found):.2f}% to {max(found):.2f}%")
    for line in lines:
        if line["kind"] != "cell" or "error" in line or "skipped" in line:
            print({key: value for key, value in line.items() if not key.startswith(("dry", "closed"))})
