"""Fused kernels in the model that transformers' Trainer trains."""

import logging
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from fusedops.patching import PatchReport, patch
from fusedops.patching.again import look_again

__all__ = ["FusedOpsCallback"]

log = logging.getLogger(__name__)


class FusedOpsCallback(TrainerCallback):
    """`fusedops.patch` for a Trainer's model: `Trainer(..., callbacks=[FusedOpsCallback()])`.

    The arguments are those of `fusedops.patch`. The model is patched when the Trainer is made,
    before anything wraps it; the one that a `model_init` makes later, when its training begins.
    It stays patched: what the Trainer saves is what it would save without.

    report: what was fused; None before there is a model. Trainers may put a forward of their own on
    the model after it was patched (TRL's, with a fused head), and users set another attention: when
    training begins, a site that no longer runs moves to `report.skipped`, with the reason.
    log_level: of the report in the log of this module, on the first process. Python shows warnings
    and no less until a program says otherwise: `log_level=logging.WARNING` shows the report in any
    program, `logging.basicConfig(level=logging.INFO)` shows all that is logged at the default.

    Raises what `fusedops.patch` raises, and ValueError for `quantize` with a `model_init`, whose
    optimizer would have the weights that are quantized.
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
                "FusedOpsCallback: quantize must be None when model_init makes the model, got "
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
            log.log(self.log_level, message, str(self.report))  # as it is now
