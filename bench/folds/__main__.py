"""The 5-fold job on one GPU, contestants side by side, each in a process of its own; JSON lines as they come.

    python -m bench.folds --out bench/folds_h200.jsonl                                # 5 folds at three lengths
    python -m bench.folds --tokens 128 2048 --lanes 1 --contestants crosstune         # one fine-tune alone
    python -m bench.folds --mixed --contestants crosstune trl-grouped trl-free        # real lengths
    python -m bench.folds --tokens 128 --lanes 5 40 --contestants crosstune           # eight trials at once
    python -m bench.folds --tokens 512 --cap 16                                       # a small card's memory
    python -m bench.folds --by-name --contestants crosstune                           # crosstune loads the base itself
    python -m bench.folds --shape tiny --quantization none                            # anywhere: the script itself

All train a Llama-3 shape with the same random weights (--shape, --quantization), LoRA of rank 16 on all linear layers,
50 rows, effective batch 4, one epoch, learning rate 1e-4 on a cosine, and score every held-out row. `--out` is appended
to, so several calls on one machine make up one file; `--summary FILE` prints the ratios of all that is in one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from bench.folds.summary import show, summaries

PEERS = ("trl-small", "trl-best", "trl-liger", "trl-grouped", "trl-free", "peft", "unsloth-small", "unsloth")
USUAL = ("floor", "crosstune", "trl-small", "trl-best", "trl-liger", "peft", "unsloth")
NEEDS = {"trl": "trl", "unsloth": "unsloth", "peft": "peft"}
ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    """Run the contestants, or be one."""
    parser = arguments()
    options = parser.parse_args()
    if options.by_name and options.quantization == "int8":
        parser.error("--by-name: no folder is written with --quantization int8; take nf4 or none")
    if options.summary:
        show(summaries(of_file(options.summary)))
    elif options.child:
        if options.child.startswith("unsloth"):
            import_module("unsloth")  # it patches transformers, TRL and PEFT, so it wants to come first
        from bench.folds.child import run_child

        run_child(options)
    else:
        compete(options)


def arguments() -> argparse.ArgumentParser:
    """The command line; a child gets its parent's, and what it is to do."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.folds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 2048], help="lengths of the rows")
    parser.add_argument(
        "--mixed", action="store_true", help="rows of 50 real lengths, 57 to 1,677, in place of --tokens"
    )
    parser.add_argument("--contestants", nargs="+", choices=("floor", "crosstune", *PEERS), default=list(USUAL))
    parser.add_argument("--lanes", type=int, nargs="+", default=[5], help="crosstune's: 1 alone, 5, or 40 = 8 trials")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument(
        "--peer-folds", type=int, default=5, help="folds that the others run; 5 are reckoned from these"
    )
    parser.add_argument("--calls", type=int, default=4, help="crosstune's calls: one whole, the others steady")
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--vocab", type=int, default=0, help="default: Llama-3's 128256, or 384 for the tiny shape")
    parser.add_argument("--by-name", action="store_true", help="crosstune loads the base in each call, not counted")
    parser.add_argument("--cap", type=float, default=0, help="GiB of the card that a contestant may use; 0: all")
    parser.add_argument("--kernels", type=Path, help="keep compiled kernels here, in place of compiling all")
    parser.add_argument("--out", type=Path, help="file that the lines are appended to")
    parser.add_argument("--summary", type=Path, help="print the ratios of this file of lines and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def compete(options: argparse.Namespace) -> None:
    """One contestant after another, then the ratios."""
    lines: list[dict[str, Any]] = []
    with sink(options.out) as out, capped(options.cap):
        tell(
            out, lines, kind="env", at=datetime.now(timezone.utc).isoformat(timespec="seconds"), command=command_line()
        )
        for name in options.contestants:
            needed = NEEDS.get(name.partition("-")[0])
            if (needed and find_spec(needed) is None) or (name == "trl-liger" and find_spec("liger_kernel") is None):
                tell(out, lines, kind="absent", contestant=name, reason="not installed")
                continue
            for only in children(name, options):
                run_one(name, only, out, lines, options)
        rows = summaries(lines)
        for row in rows:
            tell(out, lines, kind="summary", **row)
    show(rows)


def children(name: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """Arguments of the contestant's processes: crosstune has one a job, so that each first call is a cold one."""
    if name != "crosstune":
        yield []
        return
    for tokens in [0] if options.mixed else options.tokens:
        for lanes in options.lanes:
            yield [*(["--mixed"] if options.mixed else ["--tokens", str(tokens)]), "--lanes", str(lanes)]


def run_one(name: str, only: list[str], out: TextIO | None, lines: list[dict[str, Any]], options: Any) -> None:
    """A contestant's process: its lines as they come, and one that says why if it fails."""
    with tempfile.TemporaryDirectory() as caches:
        kernels = str(options.kernels or f"{caches}/triton")
        is_new = not Path(kernels).is_dir()
        command = [sys.executable, "-m", "bench.folds", *sys.argv[1:], *only, "--child", name]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": kernels, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error",
            "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": f"{caches}/unsloth",
        }  # fmt: skip
        log = Path(caches) / "stderr"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
        ):
            for text in child.stdout or ():
                if text.startswith('{"kind"'):
                    cap = {"cap_gib": options.cap} if options.cap else {}
                    tell(out, lines, **json.loads(text), **cap, kernels="new" if is_new else "kept")
        said = log.read_text(errors="replace")
        sys.stderr.write(said[-4000:])
        if child.returncode:
            by_name = {"by_name": True} if options.by_name and name == "crosstune" else {}
            tell(
                out, lines, kind="failed", contestant=name, job=only, **by_name, code=child.returncode,
                said=said[-1500:],
            )  # fmt: skip


def tell(out: TextIO | None, lines: list[dict[str, Any]], **line: Any) -> None:
    """To stdout and to the file at once: a run that is cut off loses nothing."""
    lines.append(line)
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        out.write(text + "\n")
        out.flush()


@contextmanager
def sink(file: Path | None) -> Iterator[TextIO | None]:
    """The file to append to, if there is one."""
    if file is None:
        yield None
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        yield out


@contextmanager
def capped(gib: float) -> Iterator[None]:
    """Another process holds the rest of the card meanwhile: what is free is what a plan reads."""
    if not gib:
        yield
        return
    command = [sys.executable, "-m", "bench.folds.machine", str(gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        assert ballast.stdin is not None and ballast.stdout is not None
        sys.stderr.write(ballast.stdout.readline())
        try:
            yield
        finally:
            ballast.stdin.close()


def command_line() -> str:
    """As it was typed."""
    return " ".join(["python -m bench.folds", *sys.argv[1:]])


def of_file(file: Path) -> list[dict[str, Any]]:
    """Its lines."""
    return [json.loads(text) for text in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
