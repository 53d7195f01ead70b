"""Finds models with an output head and a loss function, and replaces the loss function."""

import functools
import inspect
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fusedops.patching.core.instance import Other, instead
from fusedops.patching.core.probing import names_in
from fusedops.patching.core.swap import (
    Unswappable,
    active_state,
    original_class,
    overlay,
    stacked,
)
from fusedops.patching.models.loss.function import Loss, loss_like
from fusedops.patching.models.loss.head import heads_of, is_watched, patch_head
from fusedops.patching.models.loss.logits import KEPT, SCOPE, State, keep
from fusedops.patching.models.transformers_api import missing_api
from fusedops.patching.report import PatchReport, Site

__all__ = ["KEEP", "LATE", "LINEAR", "OFF", "loss_now", "patch_losses"]

LINEAR, OF_LOGITS = "linear_cross_entropy", "cross_entropy"
KEEP = "keep_logits"
FUNCTION = "loss_function"
# How code accesses a model without its head, and the result that it reads.
BODY = "base_model", "base_model_prefix", "get_decoder", "last_hidden_state"
OFF = "it is no longer fused"
TOO = f"{KEEP}: the forward also computes the logits"
LATE = f'loss: read outputs.logits before optimizer.step(), or patch with loss="{KEEP}"'


def patch_losses(model: nn.Module, report: PatchReport, keeps: bool = False) -> None:
    """Swaps every model with a known loss in `model`, and the heads that can skip their logits.

    keeps: the forward also computes the logits' values, next to a loss without them.
    """
    sites = []
    for path, module in list(model.named_modules()):
        head = _head(module)
        if head is not None:
            sites.append(_patch(path, module, head, keeps))
    for site in sites:
        (report.fused if site.now else report.skipped).append(site)
    if not keeps and any(site.now == LINEAR for site in sites):
        report.notes.append(LATE)


def _head(module: nn.Module) -> nn.Module | None:
    """The head of a model that takes labels or names a loss function; None for others."""
    if isinstance(module, torch.jit.ScriptModule) or not hasattr(module, "get_output_embeddings"):
        return None
    original: Any = original_class(module)
    if not hasattr(original, "get_output_embeddings"):
        return None
    if _labels_at(original) is None and FUNCTION not in names_in(original):
        return None
    try:
        head = module.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # noqa: BLE001  a model without one may say so
        return None
    return head if isinstance(head, nn.Module) else None


def _labels_at(original: type[nn.Module]) -> int | None:
    """The position of `labels` among the forward's arguments."""
    names = list(inspect.signature(original.forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None


def loss_now(model: nn.Module, site: Site) -> Site:
    """The site of a fused loss, updated to how it is computed now."""
    for path, module in model.named_modules():
        head = _head(module)
        if head is not None and _where(path, module, head) == site.path:
            return _as_it_runs(module, site)
    return site


def _as_it_runs(model: nn.Module, site: Site) -> Site:
    other = _other_head(model, site.path)
    if _leaves(other, model, site.path):
        return _left_to(other, site)
    if not _is_on(model):
        return replace(site, now="", reason=_off(model))
    if site.now != LINEAR:
        return site
    if reason := _needs_logits(model, other):
        return replace(site, now=OF_LOGITS, reason=f"computed from logits: {reason}")
    may = f"{other.name} may compute the loss with its own head" if other else ""
    mentioned = may in site.reason
    return site if mentioned else replace(site, reason="; ".join(filter(None, (site.reason, may))))


def _needs_logits(model: nn.Module, other: Other | None) -> str:
    """Why a loss fused without logits now needs them; empty if it does not."""
    heads = heads_of(model)
    if other and not other.calls:
        return str(other)
    if any(map(is_watched, heads)):
        return "the head has hooks"
    fused = heads and all(active_state(head).head for head in heads)
    return "" if fused else "the head is no longer fused"


def _off(model: nn.Module) -> str:
    """Why a patched model's loss function is no longer ours."""
    loss = active_state(model).loss
    return OFF if loss is None else "another loss_function was set after patch"


def _where(path: str, model: nn.Module, head: nn.Module) -> str:
    name = next((n for n, m in model.named_modules() if m is head), "")
    return ".".join(filter(None, (path, name)))


def _head_names(where: str) -> set[str]:
    return {"get_output_embeddings", where.rpartition(".")[2]} - {""}


def _other_head(model: nn.Module, where: str) -> Other | None:
    """The function that replaces or wraps the model's forward and reads the head."""
    return instead(model, _head_names(where))


def _leaves(other: Other | None, model: Any, where: str) -> bool:
    """Whether the function computes the loss with its own head.

    If it asks the model for its loss function, it gets ours, with logits. If it calls the model's
    forward and reads the head, it counts only if it also runs the model's body itself, as TRL's
    does.
    """
    if other is None or FUNCTION in other.reads or other.reads.isdisjoint(_head_names(where)):
        return False
    body = {*BODY, getattr(model, "base_model_prefix", "")}
    return not other.calls or not other.reads.isdisjoint(body)


def _left_to(other: Other | None, site: Site) -> Site:
    return replace(site, now="", reason=f"{other} and uses its own head")


def _patch(path: str, model: nn.Module, head: nn.Module, keeps: bool) -> Site:
    """Fuses a model's loss if possible. Returns its site."""
    where = _where(path, model, head)
    original: Any = original_class(model)
    site = Site(where, "loss", original.__name__)
    other = _other_head(model, where)
    if _leaves(other, model, where):
        return _left_to(other, site)
    if reason := missing_api("loss") or _unreadable(original):
        return replace(site, reason=reason)
    theirs = getattr(original, FUNCTION).fget(model)
    site = replace(site, was=getattr(theirs, "__name__", type(theirs).__name__))
    loss = loss_like(theirs)
    if reason := loss if isinstance(loss, str) else _swap(model, loss, keeps):
        return replace(site, reason=reason)
    if reason := _patch_heads(model):
        return replace(site, now=OF_LOGITS, reason=f"computed from logits: {reason}")
    return replace(site, now=LINEAR, reason=TOO if keeps else "")


def _unreadable(original: type[nn.Module]) -> str:
    """Why patch cannot tell how a class computes its loss; empty if it can."""
    loss_function = inspect.getattr_static(original, FUNCTION, None)
    if not isinstance(loss_function, property) or FUNCTION not in names_in(original):
        return "its forward computes the loss itself"
    return "its forward has no labels argument" if _labels_at(original) is None else ""


def _patch_heads(model: nn.Module) -> str:
    """Makes the heads return lazy logits. Returns why one cannot; empty if all do."""
    if "forward" in vars(model):
        return "the model has its own forward"
    return next((why for head in heads_of(model) if (why := patch_head(head))), "")


def _swap(model: nn.Module, loss: Loss, keeps: bool) -> str:
    """Gives the model its loss function. Returns why it cannot; empty on success."""
    try:
        overlay(model, functools.partial(_model_class, loss=loss, keeps=keeps))
    except Unswappable as why:
        return str(why)
    return "" if active_state(model).loss else "another library has wrapped its class"


def _is_on(model: nn.Module) -> bool:
    """Whether the model's loss function is still the one that patch knows."""
    loss = active_state(model).loss
    original: Any = original_class(model)
    return loss is not None and getattr(original, FUNCTION).fget(model) is loss.theirs


def _model_class(
    original: type[nn.Module], below: type[Any] | None, loss: Loss, keeps: bool
) -> type:
    run: Any = (below or original).forward
    at: Any = _labels_at(original)
    loss_property: Any = inspect.getattr_static(original, FUNCTION)

    @functools.wraps(run)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        labels = args[at] if len(args) > at else kwargs.get("labels")
        heads = () if labels is None or not _is_on(self) else heads_of(self)
        if not heads:
            return run(self, *args, **kwargs)
        states: WeakSet[State] | None = WeakSet() if keeps else None
        before, kept = SCOPE.set(heads), KEPT.set(states)
        try:
            outputs = run(self, *args, **kwargs)
            if states is not None:
                keep(outputs, states)
            return outputs
        finally:
            SCOPE.reset(before)
            KEPT.reset(kept)

    def loss_function(self):
        theirs = loss_property.fget(self)
        return loss.fused if not torch.compiler.is_compiling() and _is_on(self) else theirs

    ours = property(loss_function, loss_property.fset, loss_property.fdel, loss_property.__doc__)
    methods = {"forward": forward, "loss_function": ours}
    return stacked(original, below, ("loss", loss, keeps), methods, loss=loss)
