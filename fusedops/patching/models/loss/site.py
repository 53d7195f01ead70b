"""Finds models with an output head and a loss function, and replaces the loss function."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fusedops.patching.core.instance import Other, instead
from fusedops.patching.core.probing import WrittenLoss, names_in
from fusedops.patching.core.swap import (
    Unswappable,
    active_state,
    original_class,
    overlay,
    stacked,
)
from fusedops.patching.models.loss.function import Loss, loss_like
from fusedops.patching.models.loss.head import LATER, heads_of, is_watched, patch_head
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


Read = Callable[[nn.Module, nn.Module | None], WrittenLoss | str]


def patch_losses(
    model: nn.Module, report: PatchReport, written_loss: Read, keeps: bool = False
) -> dict[str, str]:
    """Swaps every model with a known loss in `model`, and the heads that can skip their logits.

    written_loss: reads what a module's forward computes, given the model's head. keeps: the forward
    also computes the logits' values, next to a loss without them. Returns, by
    path, why the modules that compute a cross entropy do so as before; empty if they have a site.
    """
    sites, reasons = [], {}
    for path, module in list(model.named_modules()):
        head = _head(module)
        loss = written_loss(module, head)
        if isinstance(loss, WrittenLoss):
            sites.append(_patch_written(path, module, loss, keeps))
            reasons[path] = reasons[f"{path}.{loss.child}".strip(".")] = ""
        elif head is not None:
            sites.append(_patch(path, module, head, keeps, loss))
            reasons[path] = ""
        elif loss:
            reasons[path] = loss
    report.fused += [site for site in sites if site.now]
    heads = {site.path for site in sites if site.now}  # XLM's is the model's and its loss module's
    report.skipped += [site for site in sites if not site.now and site.path not in heads]
    if not keeps and any(site.now == LINEAR for site in sites):
        report.notes.append(LATE)
    return reasons


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


def loss_now(model: nn.Module, site: Site, written_loss: Read) -> Site:
    """The site of a fused loss, updated to how it is computed now."""
    for path, module in model.named_modules():
        head = _head(module)
        loss = written_loss(module, None) if head is None else ""
        if isinstance(loss, WrittenLoss):
            head = module.get_submodule(loss.head)
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
        if isinstance(active_state(model).loss, WrittenLoss):
            return replace(site, now="", reason=reason)
        return replace(site, now=OF_LOGITS, reason=f"computed from logits: {reason}")
    may = f"{other.name} may compute the loss with its own head" if other else ""
    mentioned = may in site.reason
    return site if mentioned else replace(site, reason="; ".join(filter(None, (site.reason, may))))


def _needs_logits(model: nn.Module, other: Other | None) -> str:
    """Why a loss fused without logits now needs them; empty if it does not."""
    heads = _heads(model)
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


def _patch_written(path: str, model: nn.Module, loss: WrittenLoss, keeps: bool) -> Site:
    """Fuses a cross entropy that the model's forward computes. Returns its site."""
    head = next(iter(heads_of(model, loss.head)), None)
    if head is None:
        return Site(path, "loss", loss.was, reason="it has no head")
    where = _where(path, model, head)
    site, other = Site(where, "loss", loss.was), _other_head(model, where)
    if _leaves(other, model, where):
        return _left_to(other, site)
    if reason := _patch_heads(model, heads_of(model, loss.head)) or _swap(model, loss, keeps):
        return replace(site, reason=reason)
    return replace(site, now=LINEAR, reason=TOO if keeps else "")


def _patch(path: str, model: nn.Module, head: nn.Module, keeps: bool, written: str) -> Site:
    """Fuses a model's loss if possible. Returns its site. written: why its own code stays."""
    where = _where(path, model, head)
    original: Any = original_class(model)
    site = Site(where, "loss", original.__name__)
    other = _other_head(model, where)
    if _leaves(other, model, where):
        return _left_to(other, site)
    if reason := missing_api("loss") or written or _unreadable(original):
        return replace(site, reason=reason)
    theirs = getattr(original, FUNCTION).fget(model)
    site = replace(site, was=getattr(theirs, "__name__", type(theirs).__name__))
    loss = loss_like(theirs)
    if reason := loss if isinstance(loss, str) else _swap(model, loss, keeps):
        return replace(site, reason=reason)
    if reason := _patch_heads(model, heads_of(model)):
        return replace(site, now=OF_LOGITS, reason=f"computed from logits: {reason}")
    return replace(site, now=LINEAR, reason=TOO if keeps else "")


def _unreadable(original: type[nn.Module]) -> str:
    """Why patch cannot tell how a class computes its loss; empty if it can."""
    loss_function = inspect.getattr_static(original, FUNCTION, None)
    if not isinstance(loss_function, property) or FUNCTION not in names_in(original):
        return "its forward computes the loss itself"
    return "its forward has no labels argument" if _labels_at(original) is None else ""


def _patch_heads(model: nn.Module, heads: tuple[nn.Module, ...]) -> str:
    """Makes the heads return lazy logits. Returns why one cannot; empty if all do."""
    if "forward" in vars(model):
        return "the model has its own forward"
    return next((why for head in heads if (why := patch_head(head))), "")


def _heads(model: nn.Module) -> tuple[nn.Module, ...]:
    """The heads of a patched model."""
    loss = active_state(model).loss
    return heads_of(model, loss.head if isinstance(loss, WrittenLoss) else "")


def _swap(model: nn.Module, loss: Loss | WrittenLoss, keeps: bool) -> str:
    """Gives the model its loss function. Returns why it cannot; empty on success."""
    try:
        overlay(model, functools.partial(_model_class, loss=loss, keeps=keeps))
    except Unswappable as why:
        return str(why)
    return "" if active_state(model).loss else "another library has wrapped its class"


def _is_on(model: nn.Module) -> bool:
    """Whether the model's loss function is still the one that patch knows."""
    loss = active_state(model).loss
    if isinstance(loss, WrittenLoss):
        return True
    original: Any = original_class(model)
    return loss is not None and getattr(original, FUNCTION).fget(model) is loss.theirs


def _model_class(
    original: type[nn.Module], below: type[Any] | None, loss: Loss | WrittenLoss, keeps: bool
) -> type:
    run: Any = (below or original).forward
    written = isinstance(loss, WrittenLoss)
    names = list(inspect.signature(original.forward).parameters)
    labels = [(name, names.index(name) - 1) for name in loss.labels]

    @functools.wraps(run)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        given = (args[at] if len(args) > at else kwargs.get(name) for name, at in labels)
        trains = not any(value is None for value in given) and _is_on(self)
        heads = _heads(self) if trains else ()
        if not heads:
            return run(self, *args, **kwargs)
        states: WeakSet[State] | None = WeakSet() if keeps else None
        before, kept, later = SCOPE.set(heads), KEPT.set(states), LATER.set(written)
        try:
            outputs = run(self, *args, **kwargs)
            if states is not None:
                keep(outputs, states)
            return outputs
        finally:
            SCOPE.reset(before)
            KEPT.reset(kept)
            LATER.reset(later)

    if isinstance(loss, WrittenLoss):
        return stacked(original, below, ("loss", loss, keeps), {"forward": forward}, loss=loss)

    function: Loss = loss
    loss_property: Any = inspect.getattr_static(original, FUNCTION)

    def loss_function(self):
        theirs = loss_property.fget(self)
        return function.fused if not torch.compiler.is_compiling() and _is_on(self) else theirs

    ours = property(loss_function, loss_property.fset, loss_property.fdel, loss_property.__doc__)
    methods = {"forward": forward, "loss_function": ours}
    return stacked(original, below, ("loss", loss, keeps), methods, loss=loss)
