"""What a wave has room for: its plan as it is now, how passes run under it, and what happens where memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from crosstune.memory.plan import Plan
from crosstune.model.attach import Slots
from crosstune.train.checkpoint import Checkpoints, Packed
from crosstune.train.cutting import choose_cutting, sizes_of_wave
from crosstune.train.fault import blamed_on_wave
from crosstune.train.graph import Passes, recorded_sizes
from crosstune.train.lane import Lane
from crosstune.train.recover import PlanChanged, is_out_of_memory, next_smaller, smaller_plan, survive
from crosstune.train.split import Shared, go_on_in_halves
from crosstune.train.state import Standing

Result = TypeVar("Result")


class Room:
    """The plan of a wave, which becomes a smaller one where memory runs out. `pack`: the wave as it stands."""

    def __init__(
        self,
        slots: Slots,
        lanes: list[Lane],
        plan: Plan,
        shared: Shared,
        checkpoints: Checkpoints,
        standing: Standing,
        pack: Callable[[], Packed],
    ) -> None:
        self.slots, self.lanes, self.plan, self.checkpoints = slots, lanes, plan, checkpoints
        self.tokens, self.report, self.progress = shared.tokens, shared.report, shared.progress
        self.standing, self.pack = standing, pack
        self._passes: Passes | None = None
        slots.keep_weights(plan.copies)

    @property
    def passes(self) -> Passes:
        """How passes run under the plan as it is now."""
        if self._passes is None:
            cutting = choose_cutting(self.slots, self.lanes, self.tokens, self.plan.micro_batch)
            may_record = self.plan.recorded and self.slots.is_recordable(flat=cutting.most_tokens > 0)
            uses = sizes_of_wave(self.lanes, self.tokens, cutting) if may_record else {}
            self._passes = Passes(self.slots, cutting, recorded_sizes(self.slots, uses), self.progress.say)
        return self._passes

    def take(self, plan: Plan) -> None:
        """Go on with another plan."""
        before, self.plan = self.plan, plan
        self._passes = None
        self.slots.recompute_first(plan.checkpointed_layers)
        if before.copies and not plan.copies:
            self.slots.keep_weights(False)

    def survive(
        self,
        doing: str,
        action: Callable[[], Result],
        *,
        evaluating: bool = False,
        may_split: bool = False,
        may_keep: bool = True,
    ) -> Result:
        """`action()`; where memory runs out, again with the next smaller plan, from which the wave then goes on.

        `may_split`: nothing has changed since the step before it, so the lanes may go on in halves.
        `may_keep`: the wave as it stands is one to go on from.
        """

        def shrink(message: str) -> None:
            if may_split and len(self.lanes) > 1 and next_smaller(self.plan, evaluating=evaluating) is None:
                self._split(doing, message)
            before = self.plan
            after = smaller_plan(before, doing, evaluating=evaluating, lanes=len(self.lanes))
            self._passes = None  # recorded passes hold memory
            if may_keep:
                self._keep_the_old_plans_work()
            self.take(after)
            jobs = tuple(lane.job for lane in self.lanes)
            self.report(PlanChanged(jobs, self.standing.steps, doing, message, before, after))

        with blamed_on_wave(self.standing.steps):
            return survive(action, shrink, self.slots.base.device)

    def _split(self, doing: str, message: str) -> NoReturn:
        jobs = [lane.job for lane in self.lanes]
        go_on_in_halves(self.pack(), jobs, self.plan, doing=doing, message=message, report=self.report)

    def _keep_the_old_plans_work(self) -> None:
        """A checkpoint, so that a run which ends now doesn't train it again with the new plan; if memory allows."""
        if self.checkpoints.folder is None:
            return
        try:
            self.checkpoints.save(self.pack())
            self.checkpoints.wait()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
