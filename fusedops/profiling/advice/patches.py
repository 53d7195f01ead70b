"""Advice to patch a model: found by looking at the model, without changing it."""

import warnings
from collections.abc import Iterator

from torch import nn

from fusedops.patching import patched
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.advice.advice import Advice

__all__ = ["patch_advice"]


def patch_advice(model: nn.Module) -> Iterator[Advice]:
    """One advice if `fusedops.patch` would fuse anything that is not fused yet.

    The model is patched and put back. The saving depends on every site's shapes, so it is only
    measured. None for a model that is patched already.
    """
    if fused_modules(model):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # patch warns where it finds nothing
        with patched(model) as report:
            kinds = [f"{n} {kind}" for kind, (n, _) in report.coverage.items() if n]
    if kinds:
        yield Advice(
            "patch",
            "fusedops.patch(model)",
            f"it would fuse {', '.join(kinds)} sites",
            "fusedops.patch(model)",
            "results differ by rounding; fusedops.verify(model, batch) compares",
        )
