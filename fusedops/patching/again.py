"""Re-checks a patched model: later changes may have overridden what was fused."""

from dataclasses import replace

from torch import nn

from fusedops.patching.core.config import view_of
from fusedops.patching.core.instance import instead
from fusedops.patching.core.swap import fused_modules
from fusedops.patching.models.attention.site import attends
from fusedops.patching.models.loss.site import LATE, LINEAR, OFF, loss_now
from fusedops.patching.report import PatchReport, Site

__all__ = ["look_again"]


def look_again(model: nn.Module, report: PatchReport) -> bool:
    """Updates patch's report where a fused function no longer runs.

    After patch, trainers may replace the forward of the model or its modules; users may set another
    attention, replace modules, or unpatch. Such a site moves from `fused` to `skipped`, with that
    reason. Returns whether anything changed.
    """
    now = [_now(model, site) for site in report.fused]
    changed = now != report.fused
    report.fused[:] = [site for site in now if site.now]
    report.skipped += [site for site in now if not site.now]
    if not any(site.now == LINEAR for site in report.fused):
        report.notes[:] = [note for note in report.notes if note != LATE]
    return changed


def _now(model: nn.Module, site: Site) -> Site:
    if site.kind == "loss":
        return loss_now(model, site)
    try:
        module = model.get_submodule(site.path)
    except AttributeError:  # another library has moved the module
        return site
    if site.kind == "quantize":  # unpatch does not undo it
        return site
    reason = _attention_off(module) if site.kind == "attention" else _off(module)
    reason = reason or str(instead(module) or "")
    return replace(site, now="", reason=reason) if reason else site


def _off(module: nn.Module) -> str:
    """Why neither the module nor any module inside it is fused now; empty if one is."""
    return "" if fused_modules(module) else OFF


def _attention_off(module: nn.Module) -> str:
    """Why the attention's config no longer names ours; empty if it does."""
    if attends(module):
        return ""
    view = view_of(module)
    if view is None:
        return OFF
    if getattr(view, "output_attentions", False):
        return "output_attentions was set after patch, so attention weights are needed"
    return f"the implementation was set to {view._attn_implementation} after patch"
