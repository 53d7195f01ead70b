"""Fused kernels in the model that transformers' Trainer trains."""

from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from fusedops.patching import PatchReport, patch

__all__ = ["FusedOpsCallback"]


class FusedOpsCallback(TrainerCallback):
    """`fusedops.patch` for a Trainer's model: `Trainer(..., callbacks=[FusedOpsCallback()])`.

    The arguments are those of `fusedops.patch`. The model is patched when the Trainer is made,
    before anything wraps it; the one that a `model_init` makes later, when its training begins.
    It stays patched: what the Trainer saves is what it would save without.

    report: what was fused, which the first process prints; None before there is a model.
    Raises what `fusedops.patch` raises, and ValueError for `quantize` with a `model_init`, whose
    optimizer would have the weights that are quantized.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report: PatchReport | None = None
        self._model: nn.Module | None = None

    def on_init_end(self, args, state, control, model=None, **kwargs) -> None:
        if model is not None:
            self._patch(model, state)

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        if model is None or any(m is self._model for m in model.modules()):  # FSDP wraps it
            return
        if self.options.get("quantize") is not None:
            raise ValueError(
                "FusedOpsCallback: quantize must be None where a model_init makes the model, got "
                f"{self.options['quantize']!r}: quantize the model in model_init"
            )
        self._patch(model, state)

    def _patch(self, model: nn.Module, state: Any) -> None:
        self.report, self._model = patch(model, **self.options), model
        if state.is_world_process_zero:
            print(self.report)
