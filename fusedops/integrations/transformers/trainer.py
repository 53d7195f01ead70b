"""A callback that patches the model of transformers' Trainer."""

import logging
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from fusedops.patching import PatchReport, patch
from fusedops.patching.patch import look_again

__all__ = ["FusedOpsCallback"]

log = logging.getLogger(__name__)


class FusedOpsCallback(TrainerCallback):
    """Patches a Trainer's model: `Trainer(..., callbacks=[FusedOpsCallback()])`.

    The arguments are those of `fusedops.patch`. The model is patched when the Trainer is created,
    before anything wraps it. A model that `model_init` creates later is patched when training
    begins. It stays patched; the Trainer saves the same files as without the callback.

    report: what was fused; None before there is a model. After patch, a trainer may replace the
    model's forward (TRL's does, with its own fused head), and users may set another attention. When
    training begins, sites that no longer run move to `report.skipped`, with the reason. log_level:
    the level at which this module's logger writes the report, on the first process. By default
    Python shows only warnings: `log_level=logging.WARNING` shows the report in any program;
    `logging.basicConfig(level=logging.INFO)` shows everything logged at the default level.

    Raises what `fusedops.patch` raises, and ValueError for `quantize` with a `model_init`, because
    the optimizer would still step the float weights.
    """

    def __init__(self, *, log_level: int = logging.INFO, **options: Any) -> None:
        self.options, self.log_level = options, log_level
        self.report: PatchReport | None = None
        self._model: nn.Module | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs) -> None:
        if model is not None:
            self._patch(model, state)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        if model is None:
            return
        if any(m is self._model for m in model.modules()):  # FSDP wraps it
            self._look_again(state)
            return
        if self.options.get("quantize") is not None:
            raise ValueError(
                "FusedOpsCallback: quantize must be None when model_init creates the model, got "
                f"{self.options['quantize']!r}: quantize the model in model_init"
            )
        self._patch(model, state)

    def _patch(self, model: nn.Module, state: Any) -> None:
        self.report, self._model = patch(model, **self.options), model
        self._log("%s", state)

    def _look_again(self, state: Any) -> None:
        if self._model is not None and self.report and look_again(self._model, self.report):
            self._log("as training begins: %s", state)

    def _log(self, message: str, state: Any) -> None:
        if state.is_world_process_zero:
            log.log(self.log_level, message, str(self.report))  # the current report
