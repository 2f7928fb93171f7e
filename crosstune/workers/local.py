"""One wave after another, on this device and in this process. The base is loaded once, before the first."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crosstune.data.tokens import Tokens
from crosstune.memory.layout import Layout
from crosstune.memory.plan import Plan
from crosstune.memory.shape import ModelShape
from crosstune.model.base import DTYPES, Base, norm_dtype
from crosstune.model.device import Place, empty_cache, free_bytes
from crosstune.model.launches import Launches
from crosstune.model.warm import WarmUp, warm_up
from crosstune.progress import Progress
from crosstune.recipe.sections import Model
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.events import Event, GivenUp, Report
from crosstune.train.fault import WaveFault
from crosstune.train.lane import LaneJob
from crosstune.train.recover import LeakWatch, PlanChanged, WaveSplit, compare_peak, refuse_to_shrink, survive
from crosstune.train.run_wave import run_wave
from crosstune.workers.waves import fail_wave


def run_waves(
    base: Base,
    waves: Iterable[Sequence[LaneJob]],
    tokens: Tokens,
    plan: Plan,
    *,
    report: Report,
    progress: Progress,
    checkpoints: Callable[[Sequence[LaneJob]], Checkpoints],
    given_up: GivenUp = lambda job: "",
) -> None:
    """Train the waves in order. A wave's checkpoints go when all that it reported is recorded."""
    leaks, planned = LeakWatch(base.device, progress.say), plan

    def told(event: Event) -> None:
        if isinstance(event, PlanChanged | WaveSplit):
            progress.say(str(event))
        report(event)

    for number, jobs in enumerate(waves):
        if number:  # nothing follows the last one, and looking takes up to half a second
            leaks.wave_ended()
        kept = checkpoints(jobs)
        try:
            plan = run_wave(
                base, jobs, tokens, plan, report=told, progress=progress, checkpoints=kept, given_up=given_up
            )
            kept.drop()
        except WaveFault as fault:
            progress.say(f"a wave failed ({fault}); its lanes are recorded as failed")
            kept.drop()
            fail_wave(jobs, fault.reason, fault.step, report)
        finally:
            kept.close()
        empty_cache(base.device)
    if plan is planned and (hint := compare_peak(plan, base.device)):
        progress.say(hint)


class LocalWorkers:
    """This device and this process as the one worker. The base is loaded when it is first needed.

    model   what `load` makes the base of, if that is in memory already
    """

    def __init__(
        self, place: Place, load: Callable[[Place, Layout | None], Base], progress: Progress, model: Any = None
    ) -> None:
        self._place, self._load_base, self._progress, self._model = place, load, progress, model
        self._warm_up: WarmUp | None = None
        self._base: Base | None = None
        self._layout: Layout | None = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm_up is not None:
            self._warm_up.end()
        if self._base is not None:
            self._base.release()

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Who trains: this process."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [{"pid": os.getpid(), "host": socket.gethostname(), "cuda_visible_devices": gpus}]

    def place(self) -> tuple[Place, int]:
        """The device, with all that was decided about it, and the bytes that are free on it."""
        return self._place, free_bytes(self._place.device)

    def warm_up(self, model: Model, shape: ModelShape, *, dropout: bool) -> None:
        """Begin to compile what the base's passes will need; `dropout`: of any lane."""
        dtype = DTYPES[self._place.precision.value]
        norms = dtype if self._model is None else norm_dtype(self._model, dtype)
        nested = model.double_quant if model.quantization == "nf4" else None
        self._warm_up = warm_up(Launches(self._place.device, shape, dtype, norms, nested, dropout))

    def lay_out(self, plan: Plan) -> None:
        """Load the base as the plan has it: on one device, or over several."""
        assert self._base is None
        self._layout = plan.layout

    def apply(self, function: Callable[..., Any], *args: Any, tick: Callable[[int], None] | None = None) -> Any:
        """`function(base, *args)`; `tick` is handed on if given. Raises DeviceError where memory runs out for good."""
        more = {} if tick is None else {"tick": tick}
        return survive(lambda: function(self._loaded(), *args, **more), refuse_to_shrink, self._place.device)

    def _loaded(self) -> Base:
        if self._base is None:
            self._base = self._load_base(self._place, self._layout)
        if self._warm_up is not None:
            self._warm_up.until_scoring()
        return self._base

    def run_waves(
        self,
        waves: Iterable[Sequence[LaneJob]],
        tokens: Tokens,
        plan: Plan,
        *,
        report: Report,
        checkpoints: Callable[[Sequence[LaneJob]], Checkpoints],
        given_up: GivenUp | None = None,
    ) -> None:
        """Train the waves in order. `given_up`: lanes may be ended early."""
        told: dict[str, Any] = {} if given_up is None else {"given_up": given_up}

        def train(base: Base) -> None:
            if self._warm_up is not None:
                self._warm_up.until_training()
            run_waves(
                base, waves, tokens, plan, report=report, progress=self._progress, checkpoints=checkpoints, **told
            )

        self.apply(train)
