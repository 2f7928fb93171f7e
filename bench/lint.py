"""Lint a million short rows in bounded memory: `python -m bench.lint [--rows N] [--model FOLDER]`.

Rows are made up from a seed (about 100 bytes each): one in 1,000 repeats the row before it, one in 10,000 is broken.
Prints rows a second and the peak memory of the whole process; exits 1 above 2 GiB, or if other findings than those
planted come out.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from crosstune.data.lint import lint
from crosstune.progress import choose_progress
from crosstune.units import bytes_words

LIMIT_BYTES = 2 * 1024**3
SYLLABLES = "ba ce di fo gu la me ni po ru sa te vi zo".split()  # noqa: SIM905
DUPLICATE_EVERY, BROKEN_EVERY = 1_000, 10_000


def write_rows(file: Path, num_rows: int, seed: int = 0) -> tuple[int, int]:
    """Write the rows; how many repeat another, and how many are no JSON."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randrange(1, 4))) for _ in range(4000)]
    duplicates = broken = 0
    line = ""
    with file.open("w", encoding="utf-8") as out:
        for number in range(1, num_rows + 1):
            if number % BROKEN_EVERY == 0:
                out.write('{"prompt": "cut he\n')
                broken += 1
                continue
            if number % DUPLICATE_EVERY == 0:
                duplicates += 1
            else:
                question, answer = " ".join(rng.choices(words, k=7)), " ".join(rng.choices(words, k=5))
                line = json.dumps({"prompt": f"{question}?", "completion": answer})
            out.write(line + "\n")
    return duplicates, broken


def main() -> int:
    """Make the file, lint it, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--model", help="folder of a model: its tokenizer is used too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        duplicates, broken = write_rows(file, asked.rows)
        size = file.stat().st_size
        began = time.perf_counter()
        report = lint(file, model=asked.model, progress=choose_progress())
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {
        code: sum(f.count for f in report.findings if f.code == code) for code in ("duplicate-rows", "json-syntax")
    }
    print("| rows | file | seconds | rows a second | peak memory | equal rows | broken rows |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    print(
        f"| {asked.rows:,} | {size / 1e6:.0f} MB | {seconds:.1f} | {asked.rows / seconds:,.0f} | {bytes_words(peak)} "
        f"| {found['duplicate-rows']:,} | {found['json-syntax']:,} |"
    )
    # A repeated row is counted with the row that it repeats.
    right = found == {"duplicate-rows": 2 * duplicates, "json-syntax": broken}
    return 0 if peak < LIMIT_BYTES and right else 1


if __name__ == "__main__":
    sys.exit(main())
