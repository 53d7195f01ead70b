"""Counts how often each fused part of a model ran a kernel or torch's code."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.measuring.snapshot import Snapshot
from fusedops.patching.core.calls import CallWatch, SiteCall
from fusedops.patching.core.swap import fused_modules
from fusedops.patching.report import CallCounts, PatchReport, SiteCalls
from fusedops.patching.yardstick import Batch, call, fresh, objective

__all__ = ["count_calls"]

Place = tuple[str, str]  # a site's path and kind


def count_calls(
    held: "weakref.ref[nn.Module]", watch: Callable[[], Any], report: PatchReport, batch: Batch
) -> CallCounts:
    """`PatchReport.counts` of the report that patch made for a model. Marks what did not run.

    watch: makes a context, whose `ran(model, site)` says afterwards whether a kept site ran.
    """
    if not isinstance(batch, Mapping | Tensor | tuple | list):
        raise TypeError(
            "counts: batch must be a dict of keyword arguments, a tuple or list of positional "
            f"ones, or a tensor, got {type(batch).__name__}"
        )
    model = held()
    if model is None:
        raise RuntimeError("counts: the model that patch was given no longer exists")
    sites = {(s.path, s.kind): SiteCalls(s.path, s.kind, s.now) for s in reversed(report.fused)}
    kept_calls = watch()
    watched = _watched(model, batch, kept_calls)
    if report.fused and not watched and not fused_modules(model):
        raise RuntimeError("counts: the model is no longer patched")
    calls = _by_place(model, watched, sites)
    counts = CallCounts([_counted(sites[place], calls[place]) for place in reversed(sites)])
    uncalled = counts.uncalled
    report.fused[:] = [
        replace(s, uncalled=(s.path, s.kind) in uncalled or kept_calls.missed(model, s))
        for s in report.fused
    ]
    report.kept[:] = [replace(s, uncalled=not kept_calls.ran(model, s)) for s in report.kept]
    return counts


def _watched(model: nn.Module, batch: Batch, kept_calls: Any) -> list[SiteCall]:
    """The calls in one forward and backward, after which the model is as before."""
    kept = Snapshot(model, None)
    try:
        with _gradients(), CallWatch() as watch:
            with kept_calls:
                outputs = call(model, fresh(batch))
            loss = objective(outputs)
            needed = [p for p in model.parameters() if p.requires_grad]
            if needed and loss.requires_grad:
                torch.autograd.grad(loss, needed, allow_unused=True)
    finally:
        kept.restore()
    return watch.calls


@contextmanager
def _gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _by_place(
    model: nn.Module, calls: Iterable[SiteCall], sites: Mapping[Place, SiteCalls]
) -> dict[Place, list[SiteCall]]:
    """The calls of each site. A site's call inside of a call of the same site does not count."""
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path)
    calls_by_place: dict[Place, list[SiteCall]] = defaultdict(list)
    for site_call in calls:
        outer = site_call.inside
        if outer and outer.backward is None and site_call.backward is not None:
            outer.backward = False  # a sum's backward runs no operator, but its norm's does
        place = _place(site_call, paths, sites)
        while outer is not None and _place(outer, paths, sites) != place:
            outer = outer.inside
        if place is not None and outer is None:
            calls_by_place[place].append(site_call)
    return calls_by_place


def _place(
    site_call: SiteCall, paths: Mapping[nn.Module, list[str]], sites: Mapping[Place, SiteCalls]
) -> Place | None:
    """The site of a call; for PEFT's copy of a head, that of the module around it."""
    for path in paths.get(site_call.module, ()):
        while path and (path, site_call.kind) not in sites:
            path = path.rpartition(".")[0]
        if (path, site_call.kind) in sites:
            return path, site_call.kind
    return None


def _counted(site: SiteCalls, calls: list[SiteCall]) -> SiteCalls:
    kernel = sum(site_call.kernel for site_call in calls)
    backward = [site_call.backward for site_call in calls if site_call.backward is not None]
    return SiteCalls(
        site.path,
        site.kind,
        site.now,
        kernel,
        len(calls) - kernel,
        sum(backward),
        len(backward) - sum(backward),
        dict(Counter(site_call.reason for site_call in calls if site_call.reason)),
    )
