"""The memory plan against a GPU: closed form, rehearsal and reading of one grid of settings, a JSON line each.

    python -m bench.memory --out grid.jsonl                 # on the GPU: 84 cells, about 5 minutes
    python -m bench.memory --out grid.jsonl --half blind    # cells not looked at while the code was written
    python -m bench.memory --out edges.jsonl --edges        # plans that just fit under a cap, and the next larger ones
    python -m bench.memory --tiny --out /tmp/grid.jsonl     # anywhere: the script itself, with tiny shapes
    python -m bench.memory --again grid.jsonl               # anywhere: predictions of today beside the readings
    python -m bench.memory --table grid.jsonl               # what was missed, and by how much

Rehearsals run in other processes beside the GPU's own work; they never see its readings.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

from bench.memory.edges import run_edges
from bench.memory.predict import again
from bench.memory.readings import read_grid
from bench.memory.table import table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="memory.jsonl")
    parser.add_argument("--models", nargs="+", default=["1b", "qwen2-1.5b", "8b"])
    parser.add_argument("--half", choices=("all", "seen", "blind"), default="all")
    parser.add_argument("--tokens", type=int, nargs="+", help="only cells whose rows have so many tokens")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--seconds", type=float, default=480, help="no new cell is read after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: tests the script")
    parser.add_argument("--edges", action="store_true", help="plans that just fit under a cap")
    parser.add_argument("--table", help="print the table of this file")
    parser.add_argument("--again", type=Path, help="make the predictions of this file anew, beside its readings")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.table:
        table(options.table)
    elif options.again:
        again(options.again, options.models, options.processes)
    else:
        run_edges(options) if options.edges else read_grid(options)


if __name__ == "__main__":
    main()
