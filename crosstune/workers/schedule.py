"""Which lanes train next: waves made one at a time from a search, as scores come in and weak trials are given up.

Waves depend on the recipe and on scores alone, never on time or luck, so a continued run walks through its journal to
the same waves: those that are over are not trained again, and what they reported is told to the search once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from crosstune.metrics import find_metric
from crosstune.results.scores import fold_scores, read_score
from crosstune.store.run import Run
from crosstune.store.state import Lane, earlier_seconds
from crosstune.sweep.search import Search, mean_score
from crosstune.sweep.sweep import Trial
from crosstune.train.events import Event, LaneEvaluated, LaneFinished, LaneRetired, Report
from crosstune.train.lane import LaneJob
from crosstune.workers.waves import cut_waves, key

MakeJobs = Callable[[Trial], Sequence[LaneJob]]


class Schedule:
    """Hands out waves, listens to what they report, and tells the search."""

    def __init__(
        self, run: Run, search: Search, make_jobs: MakeJobs, *, trials: dict[int, Trial], lanes: int,
        metric: str, report: Report, examine: Callable[[Sequence[LaneJob]], None] | None = None,
    ) -> None:  # fmt: skip
        self.run, self.search, self.make_jobs = run, search, make_jobs
        self.lanes, self.metric, self._report, self._examine = lanes, metric, report, examine
        self.trials = trials  # filled as the search gives them out
        self.jobs: dict[int, Sequence[LaneJob]] = {}
        self._given: list[list[LaneJob]] = []  # handed out so far; those that are over are examined and told
        self._told: set[int] = set()
        self._ended: set[Lane] = set()
        self._evaluations: dict[Lane, list[int]] = {}  # lane → steps reported
        search.budget.spent_seconds = earlier_seconds(run.events())
        self._under_way = find_metric(metric).kind == "loss"  # other metrics are known when a lane is over

    def waves(self) -> Iterator[list[LaneJob]]:
        """The waves in which some lane isn't over; lanes that failed once and are tried again come last."""
        again = self.run.lanes_again()
        for wave in self._all_waves():
            self._replay(wave)
            over = self.run.lanes_over()
            self._given.append(wave)
            if any(key(job) not in over and key(job) not in again for job in wave):
                yield wave
            self.catch_up()
        jobs = [job for trial in self.jobs.values() for job in trial]
        for wave in cut_waves([job for job in jobs if key(job) in again], self.lanes):
            if any(key(job) not in self.run.lanes_over() for job in wave):
                yield wave
            self.catch_up()

    def report(self, event: Event) -> None:
        """Take an event of a wave: into the run first, then to the search."""
        self._report(event)
        if isinstance(event, LaneEvaluated) and self._under_way:
            self._hear(key(event.job), event.step, _score_of(self.metric, event.scores), final=False)
        elif isinstance(event, LaneFinished) and self._under_way:
            failed = key(event.job) in self.run.failed_lanes()  # what it made couldn't be kept
            score = math.nan if failed else _score_of(self.metric, event.scores)
            self._hear(key(event.job), event.steps, score, final=True)
        elif isinstance(event, LaneRetired):
            self._hear(key(event.job), event.step, math.nan, final=True)

    def given_up(self, job: LaneJob) -> str:
        """Why the lane's trial is given up; empty if it isn't."""
        return self.search.given_up().get(job.trial, "")

    def _all_waves(self) -> Iterator[list[LaneJob]]:
        if self.search.fold_first:
            yield from self._fold_by_fold()
        else:
            yield from self._trial_by_trial()

    def _trial_by_trial(self) -> Iterator[list[LaneJob]]:
        waiting: list[LaneJob] = []
        while True:
            lanes = self._lanes()
            while len(waiting) < lanes and (trial := self._ask()) is not None:
                waiting += self.jobs[trial.index]
                lanes = self._lanes()
            waiting = [job for job in waiting if not self.given_up(job)]
            if not waiting:
                return
            wave, waiting = waiting[:lanes], waiting[lanes:]
            yield wave

    def _lanes(self) -> int:
        """Lanes of a wave. Where trials are given up under way it holds whole trials, if one fits.

        Such a rule judges a trial once all its folds are scored, and the slot of a lane that was given up is padding
        until its wave ends: waves of 12 lanes over 5 folds saved nothing, of 10 lanes 8 to 25% (bench/pruning.py).
        """
        folds = max((len(jobs) for jobs in self.jobs.values()), default=1)
        whole = self.lanes // folds * folds
        return whole if whole and self.search.stops_under_way else self.lanes

    def _fold_by_fold(self) -> Iterator[list[LaneJob]]:
        while self._ask() is not None:
            pass
        folds = max((len(jobs) for jobs in self.jobs.values()), default=0)
        for fold in range(folds):
            # A wave never holds two folds: the rule may give trials up in between.
            jobs = [jobs[fold] for jobs in self.jobs.values()]
            yield from cut_waves([job for job in jobs if not self.given_up(job)], self.lanes)

    def _ask(self) -> Trial | None:
        known = max((len(event["trials"]) for event in self.run.events("trials")), default=0)
        trial = self.search.ask(again=len(self.trials) < known)
        if trial is None:
            return None
        self.trials[trial.index], self.jobs[trial.index] = trial, self.make_jobs(trial)
        if known < len(self.trials):
            listed = [{"trial": t.index, "settings": dict(t.settings)} for t in self.trials.values()]
            self.run.record("trials", trials=listed)
        return trial

    def _replay(self, wave: Sequence[LaneJob]) -> None:
        """Tell the search what an earlier sitting reported of these lanes, in the order in which it happened."""
        if not self._under_way:
            return
        lanes = {key(job) for job in wave}
        for event in self.run.events("lane_evaluated", "lane_finished", "lane_failed"):
            lane = (event["trial"], event["fold"])
            if lane in lanes:
                final = event["event"] != "lane_evaluated"
                score = read_score(event.get(self.metric))
                step = event["steps"] if event["event"] == "lane_finished" else event["step"]
                self._hear(lane, step, score, final=final)

    def _hear(self, lane: Lane, step: int, score: float, *, final: bool) -> None:
        trial, fold = lane
        steps = self._evaluations.setdefault(lane, [])
        if fold is None or (final and lane in self._ended) or (not final and step in steps):
            return
        if step not in steps:
            steps.append(step)
        if final:
            self._ended.add(lane)
        self.search.report(trial, fold, steps.index(step) + 1, score, final=final)

    def catch_up(self) -> None:
        """Examine lanes that are over, report what only the exam knows, tell trials that are over.

        Done between waves, and once more at the end: where waves run side by side, some end after the last was asked.
        """
        over = self.run.lanes_over()
        if self._examine is not None:
            for wave in self._given:  # whole, for what lanes answer together depends on it in the last bit
                if all(key(job) in over for job in wave):
                    self._examine(wave)
        scores = fold_scores(self.run)
        if not self._under_way:
            for job in (job for wave in self._given for job in wave):
                if job.fold is not None and key(job) in over:
                    score = scores.get(job.trial, {}).get(self.metric, {}).get(job.fold, math.nan)
                    self._hear(key(job), 1, score, final=True)
        self._note_given_up()
        # Of the waves handed out so far alone: a continued run's journal knows of more, which hadn't happened yet.
        given = {key(job) for wave in self._given for job in wave}
        ended = (event for event in self.run.events("wave_finished") if given.issuperset(map(tuple, event["lanes"])))
        self.search.budget.spent_tokens = sum(event["tokens"] for event in ended)
        for trial, jobs in self.jobs.items():
            gone = trial in self.search.given_up()
            if trial not in self._told and (gone or all(key(job) in over and key(job) in given for job in jobs)):
                self._told.add(trial)
                known = scores.get(trial, {}).get(self.metric, {})
                whole = not gone and len(known) == len(jobs)
                self.search.tell(trial, mean_score(known) if whole else None)

    def _note_given_up(self) -> None:
        noted = {event["trial"] for event in self.run.events("trial_given_up")}
        for trial, reason in self.search.given_up().items():
            if trial not in noted:
                self.run.record("trial_given_up", trial=trial, reason=reason)


def _score_of(metric: str, scores: Any) -> float:
    known: Mapping[str, float] = {
        "loss": scores.loss, "perplexity": math.exp(min(scores.loss, 700.0)), "token_accuracy": scores.token_accuracy,
    }  # fmt: skip
    return known[metric]
