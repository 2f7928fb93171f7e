"""A wave from its first step to its last score: all lanes together or, where memory doesn't do for that, in parts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from crosstune.data.tokens import Tokens
from crosstune.memory.plan import Plan
from crosstune.model.attach import attached
from crosstune.model.base import Base
from crosstune.model.device import live_bytes, peak_bytes, release
from crosstune.progress import Progress, stage
from crosstune.train.checkpoint import Checkpoints, Packed, no_checkpoints
from crosstune.train.events import (
    GivenUp,
    LaneRetired,
    Report,
    WaveFinished,
)
from crosstune.train.fault import blamed
from crosstune.train.lane import Lane, LaneJob, Status
from crosstune.train.recover import PlanChanged, smaller_set_up, survive
from crosstune.train.split import (
    PartCheckpoints,
    Shared,
    Split,
    go_on_in_halves,
    halves,
    join,
    lane_names,
    parts_of,
    unbegun,
)
from crosstune.train.wave import Wave


def run_wave(
    base: Base,
    jobs: Sequence[LaneJob],
    tokens: Tokens,
    plan: Plan,
    *,
    report: Report,
    progress: Progress,
    checkpoints: Checkpoints | None = None,
    given_up: GivenUp = lambda job: "",
) -> Plan:
    """Train and score all `jobs` together; tell `report` what happens. Goes on from the wave's newest checkpoint.

    Returns the plan that it ended with: a smaller one than `plan` if memory ran out (train/recover.py).
    What was reported between that checkpoint and the end of the process that wrote it is reported again, unchanged.
    """
    before, begun = live_bytes(base.device), time.monotonic()
    shared = Shared(base, tokens, report, progress, given_up, tuple(job.spec for job in jobs))
    steps, trained, plan = _run(shared, jobs, plan, checkpoints or no_checkpoints())
    report(
        WaveFinished(
            tuple(jobs),
            steps,
            trained,
            time.monotonic() - begun,
            before,
            live_bytes(base.device),
            peak_bytes(base.device),
        )
    )
    return plan


def _run(shared: Shared, jobs: Sequence[LaneJob], plan: Plan, checkpoints: Checkpoints) -> tuple[int, int, Plan]:
    """All lanes together or, where memory doesn't do for that, in parts (train/split.py): steps, tokens, plan."""
    packed = checkpoints.load()
    parts = parts_of(packed)
    if parts is None:
        try:
            return _run_together(shared, jobs, plan, checkpoints, packed)
        except Split as split:
            parts, plan = halves(split.packed), split.plan
        release(shared.base.device)
        checkpoints.save(join(parts))
    steps = trained = 0
    for at, part in enumerate(parts):
        names = lane_names(part)
        kept = PartCheckpoints(checkpoints, parts, at)
        done, tokens, plan = _run(shared, [job for job in jobs if job.name in names], plan, kept)
        steps, trained = max(steps, done), trained + tokens
    return steps, trained, plan


def _run_together(
    shared: Shared, jobs: Sequence[LaneJob], plan: Plan, checkpoints: Checkpoints, packed: Packed | None
) -> tuple[int, int, Plan]:
    progress = shared.progress
    lanes = [_start(job, shared.tokens, shared.report) for job in jobs]
    with ExitStack() as attached_lanes:
        wave = _set_up(attached_lanes, shared, lanes, plan, checkpoints, packed)
        with stage(progress, "train", max(lane.last_step for lane in wave.lanes)):
            progress.advance(wave.standing.steps)
            with checkpoints.interrupts.waiting_for_a_step():
                wave.look_ahead()
                wave.evaluate()
                while any(lane.is_fed for lane in wave.lanes):
                    wave.step()
                    progress.advance(**wave.facts())
                    wave.evaluate()
                    wave.keep_if_due()
        if isinstance(checkpoints, PartCheckpoints):  # the other parts' checkpoints say that this one is over
            checkpoints.parts[checkpoints.at] = wave.pack()
        return wave.standing.steps, wave.standing.trained, wave.room.plan


def _set_up(
    kept: ExitStack, shared: Shared, lanes: list[Lane], plan: Plan, checkpoints: Checkpoints, packed: Packed | None
) -> Wave:
    """The lanes on the base, until `kept` is closed. Where memory runs out, without copies of the base, or in halves.

    Nothing else would be smaller: passes haven't begun.
    """
    jobs, doing = tuple(lane.job for lane in lanes), "setting up a wave"

    def set_up() -> Wave:
        with ExitStack() as trying:
            specs = [job.spec for job in jobs]
            how = attached(shared.base, specs, checkpointed_layers=plan.checkpointed_layers, among=shared.among)
            wave = Wave(trying.enter_context(how), lanes, plan, shared, checkpoints, packed)
            kept.push(trying.pop_all())
        return wave

    def shrink(message: str) -> None:
        nonlocal plan
        state = packed or unbegun([job.name for job in jobs])
        if len(jobs) > 1 and not plan.copies:
            go_on_in_halves(state, jobs, plan, doing=doing, message=message, report=shared.report)
        before, plan = plan, smaller_set_up(plan, doing)
        shared.report(PlanChanged(jobs, state[1]["step"], doing, message, before, plan))

    return survive(set_up, shrink, shared.base.device)


def _start(job: LaneJob, tokens: Tokens, report: Report) -> Lane:
    """The lane before its first step; one that has failed already if that raises."""
    lane = Lane(job, [], (), 0)

    def broken(reason: str) -> None:
        lane.fail(reason, Status.BROKEN)
        report(LaneRetired(job, reason, 0))

    with blamed(broken):
        lane = Lane.start(job, tokens)
    return lane
