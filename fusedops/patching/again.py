"""Looks at a patched model a second time: what was fused may have been overtaken since."""

from dataclasses import replace

from torch import nn

from fusedops.patching.instance import instead
from fusedops.patching.loss.site import LATE, LINEAR, loss_now
from fusedops.patching.report import PatchReport, Site

__all__ = ["look_again"]


def look_again(model: nn.Module, report: PatchReport) -> bool:
    """Corrects patch's report where another library's forward runs now instead of a fused one.

    Trainers put one on the model, or on modules in it, after patch. Such a site moves from `fused`
    to `skipped`, with that as the reason. Returns whether anything has changed.
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
    except AttributeError:  # another library has put the module elsewhere
        return site
    other = instead(module)
    return replace(site, now="", reason=str(other)) if other else site
