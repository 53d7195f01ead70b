"""A callback for transformers' Trainer that patches its model and can profile its steps."""

import logging
import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from fusedops.measuring.faults import PageFaults, faults_matter
from fusedops.patching import PatchReport, patch
from fusedops.patching.patch import look_again

if TYPE_CHECKING:
    from fusedops.profiling.recording import Recording
    from fusedops.profiling.report import Profile

__all__ = ["FusedOpsCallback"]

log = logging.getLogger(__name__)
WARM_UP, COUNTED = 3, 5  # steps


class FusedOpsCallback(TrainerCallback):
    """Patches a Trainer's model: `Trainer(..., callbacks=[FusedOpsCallback()])`.

    The other arguments are those of `fusedops.patch`. The model is patched when the Trainer is
    created, before anything wraps it. A model that `model_init` creates later is patched when
    training begins. It stays patched; the Trainer saves the same files as without the callback.

    report: what was fused; None before there is a model. After patch, a trainer may replace the
    model's forward (TRL's does, with its own fused head), and users may set another attention. When
    training begins, sites that no longer run move to `report.skipped`, with the reason. One line on
    what was fused is logged as a warning, which every program shows. log_level: the level at which
    this module's logger writes the whole report, on the first process. By default Python shows only
    warnings: `log_level=logging.WARNING` shows the report in any program;
    `logging.basicConfig(level=logging.INFO)` shows everything logged at the default level.

    profile: records so many steps after 3 of warm-up, as `fusedops.recording` does. The next log of
    the Trainer then has "fusedops/tokens_per_s", "fusedops/mfu", "fusedops/input_share" and
    "fusedops/peak_mib", as far as they are known, and so has every logger. `profiled` is the whole
    report, which this module's logger writes too.

    Without profile, it counts the page faults of 5 steps on a CPU after 3 of warm-up. If they take
    3 % of the steps' CPU time or more, one line is logged as a warning, which names
    `fusedops.keep_freed_memory()` with that share.

    Raises what `fusedops.patch` raises, and ValueError for `quantize` with a `model_init`, because
    the optimizer would still step the float weights.
    """

    def __init__(
        self, *, log_level: int = logging.INFO, profile: int | None = None, **options: Any
    ) -> None:
        if profile is not None and profile < 1:
            raise ValueError(f"FusedOpsCallback: profile must be at least 1 step, got {profile}")
        self.options, self.log_level, self.profile = options, log_level, profile
        self.profiled: Profile | None = None
        self._recording: Recording | None = None
        self._metrics: dict[str, float] = {}
        self.report: PatchReport | None = None
        self._model: nn.Module | None = None
        self._steps = 0
        self._faults = PageFaults()

    def on_init_end(self, args, state, control, model=None, **kwargs) -> None:
        if model is not None:
            self._patch(model, state)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        if model is None:
            return
        self._stop_recording()  # an earlier training may have raised
        self._patch_again(model, state)
        if self.profile is not None:
            self._record(model, state)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._faults.start()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self._steps += 1
        if self.profile is not None or not WARM_UP < self._steps <= WARM_UP + COUNTED:
            return
        self._faults.stop()
        if self._faults.intervals == COUNTED and model is not None and faults_matter(model):
            for line in self._faults.advice("a training step"):
                log.warning("%s", line)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._stop_recording()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if self._metrics and logs is not None:
            logs.update(self._metrics)
            if state.log_history:  # has a copy
                state.log_history[-1].update(self._metrics)
            self._metrics = {}

    def _patch_again(self, model: nn.Module, state: Any) -> None:
        if any(m is self._model for m in model.modules()):  # FSDP wraps it
            self._look_again(state)
            return
        if self.options.get("quantize") is not None:
            raise ValueError(
                "FusedOpsCallback: quantize must be None when model_init creates the model, got "
                f"{self.options['quantize']!r}: quantize the model in model_init"
            )
        self._patch(model, state)

    def _record(self, model: nn.Module, state: Any) -> None:
        from fusedops.profiling.recording import Recording

        _move_to_front(self)  # loggers that come before would not see what on_log adds

        def done() -> None:
            self.profiled = recording.report()
            self._metrics = _metrics(self.profiled)
            if state.is_world_process_zero:
                log.log(self.log_level, "%s", str(self.profiled))

        self._recording = recording = Recording(model, limit=self.profile, done=done)
        recording.start()

    def _stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.stop()
        self._recording = None

    def _patch(self, model: nn.Module, state: Any) -> None:
        self.report, self._model = patch(model, **self.options), model
        if state.is_world_process_zero and not log.isEnabledFor(self.log_level):
            fused = ", ".join(f"{n} {kind}" for kind, (n, _) in self.report.coverage.items() if n)
            log.warning("fusedops.patch: fused %s in %s", fused or "nothing", type(model).__name__)
        self._log("%s", state)

    def _look_again(self, state: Any) -> None:
        if self._model is not None and self.report and look_again(self._model, self.report):
            self._log("as training begins: %s", state)

    def _log(self, message: str, state: Any) -> None:
        if state.is_world_process_zero:
            log.log(self.log_level, message, str(self.report))  # the current report


def _metrics(report: "Profile") -> dict[str, float]:
    """The metrics that the report has, by name."""
    from fusedops.profiling.recording import peak_bytes

    shares = report.verdict.shares
    metrics = {
        "fusedops/tokens_per_s": report.time.tokens_per_s,
        "fusedops/mfu": report.time.mfu,
        "fusedops/input_share": shares["input"][1] if report.input.loader else None,
        "fusedops/peak_mib": peak_bytes() / 2**20,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _move_to_front(callback: TrainerCallback) -> None:
    """Makes a callback the first of the Trainer whose event it is handling.

    A Trainer adds its loggers before the user's callbacks and gives none of them its list, so it is
    taken from the caller's frame. Does nothing where it is not found.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)
            return
