"""Which lanes share the base: cut once, from all lanes of the run, so that a continued run forms the same waves."""

from __future__ import annotations

from collections.abc import Container, Sequence

from crosstune.store.state import Lane
from crosstune.train.events import LaneRetired, Report
from crosstune.train.lane import LaneJob


def waves_left(
    jobs: Sequence[LaneJob], lanes: int, *, over: Container[Lane], again: Container[Lane] = ()
) -> list[list[LaneJob]]:
    """The waves in which some lane isn't over, each whole: what a lane computes depends, to the bit, on its wave.

    `again` are lanes that failed once and are tried again: they form waves of their own, after the others.
    """
    first = [
        wave for wave in cut_waves(jobs, lanes) if any(key(job) not in over and key(job) not in again for job in wave)
    ]
    second = cut_waves([job for job in jobs if key(job) in again], lanes)
    return first + [wave for wave in second if any(key(job) not in over for job in wave)]


def cut_waves(jobs: Sequence[LaneJob], lanes: int) -> list[list[LaneJob]]:
    """Jobs in waves of at most `lanes`, in order."""
    return [list(jobs[start : start + lanes]) for start in range(0, len(jobs), lanes)]


def fail_wave(jobs: Sequence[LaneJob], reason: str, step: int, report: Report) -> None:
    """Every lane of a wave that raised has failed, except those that were over before."""
    for job in jobs:
        report(LaneRetired(job, reason, step))


def key(job: LaneJob) -> Lane:
    """How the run folder calls the lane."""
    return job.trial, job.fold
