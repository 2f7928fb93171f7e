"""A wave under way: the lanes that share the base at one time, step by step and score by score.

Knows time (steps, evaluations, who is due), not files: what happens is told through `report`, one event at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from crosstune.data.batches import Batch
from crosstune.memory.plan import Plan
from crosstune.model.attach import Slots
from crosstune.model.device import live_bytes
from crosstune.progress import loss_words, stage
from crosstune.train.ahead import is_worth_it, run_largest_pass
from crosstune.train.checkpoint import Checkpoints, Packed
from crosstune.train.evaluate import score_lanes
from crosstune.train.events import (
    LaneEvaluated,
    LaneFinished,
    LaneGivenUp,
    LaneRetired,
    LanesOver,
    LaneTrained,
    StepKept,
)
from crosstune.train.fault import blame_each
from crosstune.train.lane import Lane, RowScores, Status
from crosstune.train.once import Once
from crosstune.train.room import Room
from crosstune.train.split import Shared
from crosstune.train.spread_optimizer import lane_adamw
from crosstune.train.state import Standing, pack_wave, unpack_wave
from crosstune.train.step import StepResult, step_batches, train_step

Result = TypeVar("Result")
TOGETHER = 8  # adapters at most that are in main memory: told before their lanes are scored, then saved together


class _Cut(BaseException):
    """The run is to end, in the middle of an evaluation: nothing has changed since the step before it."""


class Wave:
    """The lanes of a wave under way, and what they share."""

    def __init__(
        self,
        slots: Slots,
        lanes: list[Lane],
        plan: Plan,
        shared: Shared,
        checkpoints: Checkpoints,
        packed: Packed | None = None,
    ) -> None:
        """`packed`: the newest checkpoint of these lanes, if there is one; the wave goes on from there."""
        self.slots, self.lanes, self.checkpoints = slots, lanes, checkpoints
        self.tokens, self.report, self.progress = shared.tokens, shared.report, shared.progress
        self.given_up = shared.given_up
        self.optimizer = lane_adamw(slots, [lane.job.train for lane in lanes])
        found = None if packed is None else unpack_wave(slots, self.optimizer, lanes, packed)
        self.standing = found or Standing()
        self.pack = partial(pack_wave, slots, self.optimizer, lanes, self.standing)
        self.room = Room(slots, lanes, plan, shared, checkpoints, self.standing, self.pack)
        self.begun = time.monotonic()
        self.last: StepResult | None = None
        self.trained: dict[int, Once[Mapping[str, Tensor]]] = {}  # lane → its adapter, told while it is being scored

    def look_ahead(self) -> None:
        """Meet the longest rows before the first step, where memory may not do for them."""
        if is_worth_it(self.room.plan, self.slots.base.device.type):
            self.room.survive(
                "a first pass over the longest rows",
                lambda: run_largest_pass(self.slots, self.lanes, self.tokens, self.room.passes.cutting),
                may_split=True,
            )

    def step(self) -> None:
        """One optimizer step of every lane that is not over; notes whose evaluation is due after it."""
        fed = [lane.is_fed for lane in self.lanes]
        self.last = result = self.room.survive("a training step", self._train, may_split=True)
        self.standing.steps, self.standing.trained = self.standing.steps + 1, self.standing.trained + result.num_tokens
        for k, lane in enumerate(self.lanes):
            if not fed[k]:
                continue
            lane.step += 1
            if lane.status is not Status.RUNNING:
                continue
            lane.losses.append(float(result.loss[k]))
            if not result.ok[k] and not self._may_skip(k):
                self._retire(k, "non-finite-loss" if not np.isfinite(result.loss[k]) else "non-finite-gradient")
        self.standing.due = [k for k, lane in enumerate(self.lanes) if fed[k] and lane.is_due()]

    def _train(self) -> StepResult:
        every = range(len(self.lanes))
        batches = blame_each(lambda: self._batches(every), lambda k: self._batches([k]), every, self._break)
        return train_step(self.slots, self.optimizer, self.lanes, batches, self.room.passes.run)

    def _batches(self, lanes: Sequence[int]) -> list[Batch]:
        scales = self.optimizer.scale_K.tolist()
        return step_batches(
            [self.lanes[k] for k in lanes],
            self.tokens,
            [scales[k] for k in lanes],
            self.room.passes.cutting,
            self.room.passes.fit,
        )

    def _score(self, rows_K: Sequence[Sequence[int]]) -> list[RowScores]:
        every = range(len(self.lanes))

        def score_of(lanes: Sequence[int]) -> list[RowScores]:
            whole = [k in lanes and self.lanes[k].status is not Status.BROKEN for k in every]
            rows = [rows_k if scored else () for rows_k, scored in zip(rows_K, whole, strict=True)]
            return score_lanes(
                self.slots, self.tokens, rows, tick=self._rows_scored, most_tokens=self.room.plan.evaluate_tokens
            )

        def score() -> list[RowScores]:
            return blame_each(lambda: score_of(every), lambda k: score_of([k]), every, self._break)

        return self.room.survive("an evaluation", score, evaluating=True, may_split=True)

    def evaluate(self) -> None:
        """The evaluations that are due, unless the run is to end: they are then the first thing when it goes on."""
        self._end_if_asked()
        if self.standing.due:
            try:
                self._evaluate(self.standing.due)
            except _Cut:
                self._end_if_asked()
            self.standing.due = []

    def keep_if_due(self) -> None:
        """Write a checkpoint if it is time for one."""
        fed = [lane for lane in self.lanes if lane.is_fed]
        epoch_ended = any(lane.step % lane.steps_an_epoch == 0 for lane in fed)
        if fed and self.checkpoints.is_due(self.standing.steps, epoch_ended):
            self.checkpoints.save(self.pack())
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self.checkpoints.interrupts.asked:
            self.checkpoints.save(self.pack())
            self.checkpoints.wait()
            self.checkpoints.interrupts.stop()

    def _rows_scored(self, count: int) -> None:
        if self.checkpoints.interrupts.asked:
            raise _Cut
        self.progress.advance(count)

    def _may_skip(self, k: int) -> bool:
        """In fp16 a non-finite step is skipped and the lane's loss scale halved, until the scale is below 1."""
        return self.optimizer.scaled and float(self.optimizer.scale_K[k]) >= 1.0

    def _break(self, k: int, reason: str) -> None:
        self._retire(k, reason, Status.BROKEN)

    def _retire(self, k: int, reason: str, status: Status = Status.FAILED) -> None:
        self.lanes[k].fail(reason, status)
        self.slots.clear(k)
        self.report(LaneRetired(self.lanes[k].job, reason, self.lanes[k].step))

    def _evaluate(self, due: Sequence[int]) -> None:
        """Score the lanes that are due on their held-out rows, and on the rows that decide on stopping."""
        lanes = self.lanes
        held_out = [lane.job.held_out if k in due else () for k, lane in enumerate(lanes)]
        stop_rows = [lane.stop_rows if k in due else () for k, lane in enumerate(lanes)]
        self._tell_trained(due)
        with stage(self.progress, "evaluate", sum(map(len, (*held_out, *stop_rows)))):
            scores = self._score(held_out)
            stops = self._score(stop_rows) if any(stop_rows) else scores
        held = [scores[k].loss if k in due else None for k in range(len(lanes))]
        self.progress.advance(0, note="held out: " + loss_words(held))
        stops = [stop if rows else score for stop, rows, score in zip(stops, stop_rows, scores, strict=True)]
        over: list[int] = []
        try:
            for k in due:
                lane = lanes[k]
                if lane.status is not Status.RUNNING:
                    continue
                self.report(LaneEvaluated(lane.job, lane.step, lane.step / lane.steps_an_epoch, scores[k]))
                if lane.job.train.stop is not None and lane.note_stop_loss(stop_loss(lane, stops[k])):
                    self._keep(k, scores[k])
                if not lane.is_fed:
                    over.append(k)
        finally:  # what raised is another lane's, or nobody's
            self._finish(over, scores)
        self._give_up()

    def _tell_trained(self, due: Sequence[int]) -> None:
        """The lanes whose scores no longer decide on their adapter: it can be written while they are scored."""
        for k in due[:TOGETHER]:
            lane = self.lanes[k]
            if lane.status is Status.RUNNING and not lane.is_fed and lane.job.train.stop is None:
                self.trained[k] = Once(self.slots.adapter_later(k))
                self.report(LaneTrained(lane.job, self.trained[k]))

    def _adapter(self, k: int) -> Mapping[str, Tensor]:
        fetch = self.trained.pop(k, None) or (lambda: self.slots.adapter(k))
        return self._keeping(fetch)

    def _keeping(self, fetch: Callable[[], Result]) -> Result:
        """No checkpoint meanwhile: lanes that have noted their scores would do so again, going on from it."""
        return self.room.survive("keeping an adapter", fetch, may_keep=False)

    def _give_up(self) -> None:
        """End the lanes whose trials the scores just reported made the sweep give up: their share of a pass is free."""
        for k, lane in enumerate(self.lanes):
            if lane.status is Status.RUNNING and (reason := self.given_up(lane.job)):
                lane.status, lane.reason = Status.GIVEN_UP, reason
                self.slots.clear(k)
                self.report(LaneGivenUp(lane.job, reason, lane.step))

    def _keep(self, k: int, scores: RowScores) -> None:
        if self.lanes[k].job.train.keep == "best":
            best, adapter = self._keeping(lambda: (self.slots.row(k), self.slots.adapter(k)))
            self.standing.best[k], self.standing.best_scores[k] = best, scores
            self.report(StepKept(self.lanes[k].job, self.lanes[k].step, adapter))

    def _finish(self, over: Sequence[int], scores: Sequence[RowScores]) -> None:
        """Tell of the lanes that are over, some at a time. Those at hand are told of, even if the next one raises."""
        for start in range(0, len(over), TOGETHER):
            ended: list[LaneFinished] = []
            try:
                for k in over[start : start + TOGETHER]:
                    ended.append(self._ended(k, scores[k]))
            finally:
                self.report(LanesOver(tuple(ended)))
                for event in ended:
                    self.report(event)

    def _ended(self, k: int, scores: RowScores) -> LaneFinished:
        lane, kept = self.lanes[k], self.lanes[k].step
        if k in self.standing.best:
            self.slots.put_row(k, self.standing.best.pop(k))
            kept, scores = lane.best_step, self.standing.best_scores.pop(k)
        if lane.status is Status.RUNNING:
            lane.status = Status.DONE
        seconds = time.monotonic() - self.begun
        return LaneFinished(
            lane.job, lane.status, lane.reason, lane.step, kept, scores, self._adapter(k), tuple(lane.losses), seconds
        )

    def facts(self) -> dict[str, Any]:
        """What the progress line shows after a step."""
        over = [lane.status in (Status.FAILED, Status.BROKEN) or not lane.losses for lane in self.lanes]
        return {
            "losses": [None if gone else lane.losses[-1] for lane, gone in zip(self.lanes, over, strict=True)],
            "tokens": self.last.num_tokens if self.last else 0,
            "held_bytes": live_bytes(self.slots.base.device),
        }


def stop_loss(lane: Lane, scores: RowScores) -> float:
    """The loss that decides on stopping and on the best step: a place of its own, so that a test can speak for it."""
    return scores.loss
