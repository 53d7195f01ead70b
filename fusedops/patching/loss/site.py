"""Finds models that compute a loss from a head and labels, and swaps model and head."""

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fusedops.patching.attributes import names_in
from fusedops.patching.instance import Other, instead
from fusedops.patching.loss.function import Loss, loss_like
from fusedops.patching.loss.head import heads_of, is_watched, patch_head
from fusedops.patching.loss.logits import SCOPE, keep
from fusedops.patching.reliance import moved
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.swap import ANY, Unswappable, given, original_class, overlay, stacked

__all__ = ["KEEP", "LATE", "loss_now", "patch_losses"]

LINEAR, OF_LOGITS = "linear_cross_entropy", "cross_entropy"
KEEP = "keep_logits"
FUNCTION = "loss_function"
LATE = f'loss: read outputs.logits before optimizer.step(), or patch with loss="{KEEP}"'


def patch_losses(model: nn.Module, report: PatchReport, keeps: bool = False) -> None:
    """Swaps every causal model in `model`, and the heads that can do without their logits.

    keeps: the forward computes the logits' values too, beside a loss without them.
    """
    sites = []
    for path, module in list(model.named_modules()):
        if head := _head(module):
            sites.append(_patch(path, module, head, keeps))
    for site in sites:
        (report.fused if site.now else report.skipped).append(site)
    if not keeps and any(site.now == LINEAR for site in sites):
        report.notes.append(LATE)


def _head(module: nn.Module) -> nn.Module | None:
    """The head of a model that takes labels or names a loss function; None of all others."""
    if isinstance(module, torch.jit.ScriptModule) or not hasattr(module, "get_output_embeddings"):
        return None
    original: Any = original_class(module)
    if not hasattr(original, "get_output_embeddings"):
        return None
    if _labels_at(original) is None and FUNCTION not in names_in(original):
        return None
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except ANY:  # a model without one may say so
        return None
    return head if isinstance(head, nn.Module) else None


def _labels_at(original: type[nn.Module]) -> int | None:
    """Where `labels` stands among the arguments of the forward."""
    names = list(inspect.signature(original.forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None


def loss_now(model: nn.Module, site: Site) -> Site:
    """A loss that patch has fused, as it is computed by now."""
    for path, module in model.named_modules():
        head = _head(module)
        if head is None or _where(path, module, head) != site.path:
            continue
        other = _other_head(module, site.path)
        if other and FUNCTION not in other.reads:
            return replace(site, now="", reason=f"{other}, with a head of its own")
        watched = any(map(is_watched, heads_of(module)))
        if site.now == LINEAR and (other or watched):
            by = other or "something watches the head"
            return replace(site, now=OF_LOGITS, reason=f"of logits: {by}")
    return site


def _where(path: str, model: nn.Module, head: nn.Module) -> str:
    name = next((n for n, m in model.named_modules() if m is head), "")
    return ".".join(filter(None, (path, name)))


def _other_head(model: nn.Module, where: str) -> Other | None:
    """The function that calls the head in place of the model's forward, None where there is none.

    One that asks the model for its loss function has ours, of logits.
    """
    name = where.rpartition(".")[2]
    return instead(model, {"get_output_embeddings", name} - {""})


def _patch(path: str, model: nn.Module, head: nn.Module, keeps: bool) -> Site:
    where = _where(path, model, head)
    original: Any = original_class(model)
    other = _other_head(model, where)
    if other and FUNCTION not in other.reads:
        reason = f"{other}, with a head of its own"
        return Site(where, "loss", original.__name__, reason=reason)
    if gone := moved("loss"):
        return Site(where, "loss", original.__name__, reason=gone)
    own = inspect.getattr_static(original, FUNCTION, None)
    if not isinstance(own, property) or FUNCTION not in names_in(original):
        return Site(where, "loss", original.__name__, reason="its forward has its own loss code")
    if _labels_at(original) is None:
        return Site(where, "loss", original.__name__, reason="its forward names no argument labels")
    theirs = own.fget(model)  # type: ignore[misc]
    was = getattr(theirs, "__name__", type(theirs).__name__)
    loss = loss_like(theirs)
    reason = loss if isinstance(loss, str) else _swap(model, loss, keeps)
    if reason:
        return Site(where, "loss", was, reason=reason)
    if "forward" in vars(model):
        made = "the model carries its own forward"
    else:
        made = next((why for one in heads_of(model) if (why := patch_head(one))), "")
    if made:
        return Site(where, "loss", was, OF_LOGITS, f"of logits: {made}")
    kept = f"{KEEP}: the forward computes the logits too" if keeps else ""
    return Site(where, "loss", was, LINEAR, kept)


def _swap(model: nn.Module, loss: Loss, keeps: bool) -> str:
    """Gives the model its loss function. Returns why it cannot, empty where it has."""
    try:
        overlay(model, functools.partial(_model_class, loss=loss, keeps=keeps))
    except Unswappable as why:
        return str(why)
    return "" if given(model, "_fusedops_loss") else "another library's class is on top of it"


def _model_class(
    original: type[nn.Module], below: type[Any] | None, loss: Loss, keeps: bool
) -> type:
    run: Any = (below or original).forward
    at: Any = _labels_at(original)
    own: Any = inspect.getattr_static(original, FUNCTION)

    @functools.wraps(run)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        labels = args[at] if len(args) > at else kwargs.get("labels")
        heads = () if labels is None or not _is_on(self) else heads_of(self)
        if not heads:
            return run(self, *args, **kwargs)
        before = SCOPE.set(heads)
        try:
            outputs = run(self, *args, **kwargs)
            if keeps:
                keep(outputs)
            return outputs
        finally:
            SCOPE.reset(before)

    def loss_function(self):
        theirs = own.fget(self)
        return loss.fused if not torch.compiler.is_compiling() and _is_on(self) else theirs

    def _is_on(self):
        known = given(self, "_fusedops_loss")
        return known is not None and own.fget(self) is known.theirs

    more = {
        "forward": forward,
        "loss_function": property(loss_function, own.fset, own.fdel, own.__doc__),
        "_fusedops_loss": loss,
    }
    return stacked(original, below, ("loss", loss, keeps), more)
