"""A process that is told to end, and how long it works until it has."""

from __future__ import annotations

import resource
import signal
import subprocess

import psutil


def end_by(number: signal.Signals, child: subprocess.Popen[str]) -> tuple[str, str, float]:
    """(its output, its errors, processor seconds that it worked on): those of the clock hang on what else runs here."""
    worked = sum(psutil.Process(child.pid).cpu_times()[:2])
    before = _of_children()
    child.send_signal(number)
    out, errors = child.communicate(timeout=120)
    return out, errors, _of_children() - before - worked


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
