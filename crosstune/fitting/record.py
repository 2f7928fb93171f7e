"""Events of a fit's wave → the run folder: the adapter with its card, a line in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosstune.data.tokens import Tokens
from crosstune.export.adapter import TokenizerFiles, save_adapter
from crosstune.fitting.fitted import Expected
from crosstune.recipe.recipe import Recipe
from crosstune.record import record_memory, short
from crosstune.store.run import Run
from crosstune.store.writers import Writers
from crosstune.sweep.sweep import Trial
from crosstune.train.events import Event, LaneFinished, LaneRetired, LanesOver
from crosstune.train.fault import blamed
from crosstune.train.lane import LaneJob, RowScores
from crosstune.train.recover import PlanChanged, WaveSplit
from crosstune.workers.waves import key


@dataclass(frozen=True, kw_only=True)
class FitRecorder:
    """Writes what the wave reports. `base_scores` are the untuned base's, of the held-out rows if there are any."""

    run: Run
    recipe: Recipe
    trials: Mapping[int, Trial]
    expected: Mapping[int, Expected]
    tokens: Tokens
    tokenizer: PreTrainedTokenizerBase
    base_files: Mapping[str, str]
    base_scores: RowScores | None
    writers: Writers
    tokenizer_files: TokenizerFiles

    def __call__(self, event: Event) -> None:
        """Take one event, unless it is one that a continued wave tells a second time."""
        if isinstance(event, PlanChanged | WaveSplit):
            record_memory(self.run, event, allowed=self.recipe.lint.allow)
        if isinstance(event, LanesOver):
            for lane in event.lanes:
                self._begin_to_save(lane)
        if isinstance(event, LaneFinished | LaneRetired) and key(event.job) in self.run.lanes_over():
            return
        if isinstance(event, LaneRetired):
            self._fail(event.job, event.reason, event.step)
        elif isinstance(event, LaneFinished):
            with blamed(lambda reason: self._fail(event.job, reason, event.steps)):
                self._finish(event)

    def _fail(self, job: LaneJob, reason: str, step: int) -> None:
        self.writers.drop(key(job))
        self.run.record("lane_failed", trial=job.trial, fold=None, reason=reason, step=step)

    def _begin_to_save(self, event: LaneFinished) -> None:
        if key(event.job) not in self.run.lanes_over():
            self.writers.begin("lane", key(event.job), partial(self._save, event))

    def _finish(self, event: LaneFinished) -> None:
        """The lane's line in the journal, once its folder is on the disk."""
        self._begin_to_save(event)
        facts = self.writers.result("lane", key(event.job))
        losses = [short(loss) for loss in event.losses]
        self.run.record(
            "lane_finished", trial=event.job.trial, fold=None, losses=losses, seconds=event.seconds, **facts
        )

    def _save(self, event: LaneFinished) -> dict[str, Any]:
        """The lane's adapter, by a thread of its own: what the journal then says of it."""
        job = event.job
        facts: dict[str, Any] = {
            "settings": dict(self.trials[job.trial].settings),
            "rows": len(job.train_rows),
            "steps": event.steps,
            "kept_step": event.kept_step,
            "epochs": round(job.ends_at * job.train.epochs, 6),
            "held_out": self._held_out(event),
            "held_out_rows": self.tokens.numbers[list(job.held_out)].tolist(),
        }
        save_adapter(
            self.run.lane_folder(job.trial, None) / "adapter",
            event.adapter,
            job.lora,
            target_names=job.targets,
            base_name=self.recipe.model.name,
            tokenizer=self.tokenizer,
            stop_ids=self.tokens.stop_ids,
            card=self._card(job, facts),
            base_files=self.base_files,
            tokenizer_files=self.tokenizer_files,
        )
        return facts

    def _held_out(self, event: LaneFinished) -> dict[str, float] | None:
        if self.base_scores is None:
            return None
        return {
            "loss": event.scores.loss,
            "base_loss": self.base_scores.loss,
            "token_accuracy": event.scores.token_accuracy,
            "rows": len(event.scores.rows),
            "tokens": int(event.scores.targets.sum()),
        }

    def _card(self, job: LaneJob, facts: Mapping[str, Any]) -> dict[str, Any]:
        card: dict[str, Any] = {
            "trial": job.trial,
            "fold": "all rows but those held out" if job.held_out else "all rows",
            **{name: facts[name] for name in ("rows", "epochs", "steps")},
            "data": self.recipe.data.path,
            "quantization": self.recipe.model.quantization,
            "settings": facts["settings"],
            "lora": job.lora.model_dump(mode="json"),
            "train": job.train.model_dump(mode="json"),
        }
        if job.trial in self.expected:
            card["expected on rows never seen"] = self.expected[job.trial].facts()
        if facts["held_out"] is not None:
            card["held out"] = facts["held_out"]
        return card
