"""Residual sites: a layer's forward that adds two tensors and norms the sum."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops.patching.norm import looks_like_a_norm, recipe_of, row_major
from fusedops.patching.read import Names
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.rewrite import HELPER, Found, rewrite
from fusedops.patching.source import Unreadable, innermost, parse, rebuild
from fusedops.patching.swap import Unswappable, original_class, subclass, swap, version

__all__ = ["add_norm", "patch_residuals"]

LEAVES = "residual: `{1}` leaves {0}.forward, another module norms it: not in this version"
WITHOUT = "residual: no sum of its own was recognised in {}.forward"

CONTAINERS = nn.Module.forward, nn.Sequential.forward  # the first is ModuleList's

# (child's name, what it is) of the children that the rewriting asks for
Roles = frozenset[tuple[str, str]]
# class -> (its version, its children's roles) -> the sums in its forward, or why it is not read
_known: "WeakKeyDictionary[type, dict[Hashable, list[Found] | str]]" = WeakKeyDictionary()


def patch_residuals(model: nn.Module, report: PatchReport) -> None:
    """Rewrites every forward that norms a sum. Norms come first: a sum needs a fused one."""
    for path, module in list(model.named_modules()):
        roles = _roles(module)
        has_norm = any(role == "norm" for _, role in roles)
        if has_norm and original_class(module).forward not in CONTAINERS:
            _patch_residual(path, module, roles, report)


def _patch_residual(path: str, module: nn.Module, roles: Roles, report: PatchReport) -> None:
    original = original_class(module)
    found = _find(original, roles)
    if isinstance(found, str):
        report.skipped.append(Site(path, "residual", original.__name__, reason=found))
        return
    sites = [_site(path, module, sum_) for sum_ in found if sum_.norm]
    if any(site.now for site in sites):
        swap(module, functools.partial(_fused, roles=roles))
    report.fused += [site for site in sites if site.now]
    report.skipped += [site for site in sites if not site.now]
    notes = [LEAVES.format(original.__name__, sum_.sum) for sum_ in found if not sum_.norm]
    notes += [] if found else [WITHOUT.format(original.__name__)]
    report.notes += [note for note in notes if note not in report.notes]


def _site(path: str, module: nn.Module, found: Found) -> Site:
    where = f"{path}.{found.norm}" if path else found.norm
    if reason := found.reason or _obstacle(module, found.norm):
        return Site(where, "residual", found.sum, reason=reason)
    recipe = recipe_of(getattr(module, found.norm))
    remark = "with the dropout, which draws its own mask" if found.dropout else ""
    return Site(where, "residual", found.sum, f"add_{recipe.formula}", remark)


def _obstacle(module: nn.Module, name: str) -> str:
    """What keeps a sum from being fused into the norm that follows, empty for nothing."""
    if "forward" in vars(module):
        return "the instance carries its own forward"
    norm = getattr(module, name)
    recipe = recipe_of(norm)
    if recipe is None:
        return f"its norm ({type(norm).__name__}) is not fused"
    return "" if recipe.adds else "fused sums are normed over the last dimension only"


def _roles(module: nn.Module) -> Roles:
    roles = ((name, _role(child)) for name, child in module.named_children())
    return frozenset((name, role) for name, role in roles if role)


def _role(module: nn.Module) -> str:
    if isinstance(module, nn.Dropout):
        return "dropout"
    return "norm" if looks_like_a_norm(module) or _wraps_norms(module) else ""


def _wraps_norms(module: nn.Module) -> bool:
    """Whether all that is in it are norms, as in PEFT's ModulesToSaveWrapper."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or next(module.children(), None) is None:
        return False
    leaves = (m for m in module.modules() if next(m.children(), None) is None)
    return all(looks_like_a_norm(leaf) for leaf in leaves)


def _find(original: type[nn.Module], roles: Roles) -> list[Found] | str:
    known, key = _known.setdefault(original, {}), (version(original), roles)
    if key not in known:
        try:
            known[key] = _rewrite(original, roles)[1]
        except (Unreadable, Unswappable) as why:
            known[key] = str(why)
    return known[key]


def _rewrite(original: type[nn.Module], roles: Roles) -> tuple[Callable, list[Found]]:
    """The forward of the class with its sums rewritten, and the sums."""
    function = innermost(original)
    tree = parse(function)
    names = Names(
        is_norm=lambda name: (name, "norm") in roles,
        is_dropout=lambda name: (name, "dropout") in roles,
        is_functional_dropout=lambda name: _global(function, name) is F.dropout,
    )
    found = rewrite(tree, names)
    return rebuild(tree, original, {HELPER: layer_add_norm}), found


def _global(function, dotted: str) -> object:
    """What a dotted name means in the function, None when it means nothing there."""
    head, *rest = dotted.split(".")
    value = function.__globals__.get(head)
    for name in rest:
        value = inspect.getattr_static(value, name, None)
    return value


def _fused(original: type[nn.Module], roles: Roles) -> type:
    return subclass(original, roles, lambda: _methods(original, roles))


def _methods(original: type[nn.Module], roles: Roles) -> dict:
    return {
        "forward": _rewrite(original, roles)[0],
        "_fusedops_sums": True,
        "_fusedops_aside": {"_fusedops_sums": False},
    }


def layer_add_norm(layer: nn.Module, *operands, **how) -> tuple[Tensor, Tensor]:
    """What a rewritten forward calls: add_norm, or the lines that it stands for after unpatch."""
    run = add_norm if getattr(layer, "_fusedops_sums", False) else add_norm_plain
    norm = (how.pop("norm"),) if "norm" in how else ()
    return run(*norm, *operands, **how)


def add_norm(
    norm: nn.Module, x: Tensor, residual: Tensor, dropout=None, turned: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm(h), h) of h = x + residual, with dropout on x: fused where that changes nothing.

    dropout: None, a module, or (p, training) of F.dropout. turned: the lines say residual + x, as
    matters for the strides of h. A fused h is contiguous.
    """
    x, p = _dropout(x, dropout)
    one, other = (residual, x) if not p and _mixed(residual, x) else (x, residual)
    fused = _fused_sum(norm, one, other, p) if _fusable(norm, one, other) else None
    return fused or _plain(norm, F.dropout(x, p) if p else x, residual, turned)


def add_norm_plain(norm: nn.Module, x: Tensor, residual: Tensor, dropout=None, turned=False):
    """The lines that add_norm stands for."""
    x, p = _dropout(x, dropout)
    return _plain(norm, F.dropout(x, p) if p else x, residual, turned)


def _fused_sum(norm: Any, x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor] | None:
    return norm._fusedops_add(x, residual, p)


def _plain(norm: nn.Module, x: Tensor, residual: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
    h = residual + x if turned else x + residual
    return norm(h), h


def _dropout(x: Tensor, dropout) -> tuple[Tensor, float]:
    """x and the share of it that is still to be dropped."""
    if dropout is None:
        return x, 0.0
    if isinstance(dropout, tuple):
        p, training = dropout
        return x, p if training else 0.0
    if type(dropout) is nn.Dropout and not dropout.inplace and not _has_hooks(dropout):
        return x, dropout.p if dropout.training else 0.0
    return dropout(x), 0.0


def _fusable(norm: nn.Module, x: Tensor, residual: Tensor) -> bool:
    recipe = recipe_of(norm)
    return (
        recipe is not None
        and recipe.adds
        and type(x) is type(residual) is Tensor
        and (x.dtype == residual.dtype or (recipe.mixes and _mixed(x, residual)))
        and x.shape == residual.shape
        and x.device == residual.device
        and row_major(x)  # else h keeps their strides, and a later view may depend on them
        and row_major(residual)
        and not _has_hooks(norm)
    )


def _mixed(x: Tensor, residual: Tensor) -> bool:
    """bfloat16 beside a float32 stream; either may be a number."""
    dtypes = torch.bfloat16, torch.float32
    return (getattr(x, "dtype", None), getattr(residual, "dtype", None)) == dtypes


def _has_hooks(module: nn.Module) -> bool:
    """Whether something wants to see the call of the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or nn.modules.module._has_any_global_hook()
    )
