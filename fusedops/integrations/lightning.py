"""A callback that patches a LightningModule while Lightning fits it."""

import logging
from contextlib import ExitStack
from typing import Any

from torch import nn

from fusedops.patching import PatchReport, patched

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "fusedops.integrations.lightning needs Lightning: pip install 'fusedops[lightning]'",
            name="lightning",
        ) from None

__all__ = ["FusedOpsCallback"]

log = logging.getLogger(__name__)


class FusedOpsCallback(Callback):
    """Patches the module when `fit` starts: `Trainer(..., callbacks=[FusedOpsCallback()])`.

    The other arguments are those of `fusedops.patch`. When `fit` ends or raises, every module is
    what it was before, and the trained weights stay. Checkpoints have the same entries as without
    the callback. `validate`, `test` and `predict` run the module as it is: patch it yourself to
    speed them up. A module that is already patched stays patched. pytorch_lightning's Trainer takes
    the callback too, in a list.

    report: what was fused in the last `fit`; None before it. log_level: the level at which this
    module's logger writes the report, on the first process. By default Python shows only warnings.

    Raises ValueError for `quantize`, because `configure_optimizers` has run when `fit` starts:
    quantize the module before. Raises what `fusedops.patch` raises.
    """

    def __init__(self, *, log_level: int = logging.INFO, **options: Any) -> None:
        if options.get("quantize") is not None:
            raise ValueError(
                f"FusedOpsCallback: quantize must be None, got {options['quantize']!r}: call "
                "fusedops.quantize(module) before fit, so that the optimizer sees the change"
            )
        self.options, self.log_level = options, log_level
        self.report: PatchReport | None = None
        self._restoring = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.report = self._restoring.enter_context(patched(pl_module, **self.options))
        if trainer.is_global_zero:
            log.log(self.log_level, "%s", str(self.report))

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._restoring.close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._restoring.close()
