"""Finds transformers' attention modules that fusedops' `attention` can replace, and redirects them.

A transformers model looks up its function in `ALL_ATTENTION_FUNCTIONS` in each call. Each fused
attention gets a view of its config that names `attention`; its code is not changed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.patching.core.config import NAME, config_of, fit_view, implementation, view_of
from fusedops.patching.core.probing import F32, device_of, drawn, quiet, undisturbed, within
from fusedops.patching.core.source import Unreadable, innermost, parse, syntax_tree
from fusedops.patching.core.swap import one_line, original_class
from fusedops.patching.models.attention.interface import attend, eager_function, register_attention
from fusedops.patching.models.transformers_api import missing_api
from fusedops.patching.report import PatchReport, Site

__all__ = ["attends", "patch_attention", "why_off"]

TABLE = "ALL_ATTENTION_FUNCTIONS"
ASIDE = "its code does not use transformers' AttentionInterface"
OWN = re.compile(r"self(\.\w+)+")
WEIGHTLESS = "sdpa", "flash_attn"  # a model that supports these needs no attention weights
SCORES = "position_bias", "softcap", "s_aux"  # arguments that change the scores


def patch_attention(model: nn.Module, report: PatchReport) -> None:
    """Routes every replaceable attention to `attention`."""
    if gone := missing_api("attention"):
        report.skipped += _left(model, gone)
        return
    in_lines = [site.path for site in report.fused if site.kind == "attention"]
    for path, module, owner in _attentions(model):
        if any(other == path or other.startswith(f"{path}.") for other in in_lines):
            continue
        was = implementation(config_of(module) or owner.config)
        name = original_class(module).__name__
        site = Site(path, "attention", f"{name}/{was}" if was else name)
        if reason := _why_not_replaced(module, owner) or _fuse(module, was):
            report.skipped.append(replace(site, reason=reason))
        else:
            report.fused.append(replace(site, now="attention"))


def _fuse(module: nn.Module, was: str | None) -> str:
    """Makes the attention call ours. Returns why it cannot; empty on success."""
    register_attention()
    if was == NAME:  # the user chose it
        return ""
    try:
        fit_view(module)
    except Exception as error:  # noqa: BLE001  a config's class may be anybody's
        return f"making a view of its config failed: {one_line(error)}"
    return ""


def attends(module: nn.Module) -> bool:
    """Whether the module is an attention whose config names ours."""
    config = vars(module).get("config")
    return getattr(config, "_attn_implementation", None) == NAME and _asks(original_class(module))


def why_off(module: nn.Module) -> str:
    """Why the config of a fused attention no longer names ours; empty if it does."""
    if attends(module):
        return ""
    view = view_of(module)
    if view is None:
        return "it is no longer fused"
    if getattr(view, "output_attentions", False):
        return "output_attentions was set after patch, so attention weights are needed"
    return f"the implementation was set to {view._attn_implementation} after patch"


def _left(model: nn.Module, reason: str) -> Iterator[Site]:
    for path, module in model.named_modules():
        if _is_attention(module) and not any(map(_is_attention, _inner(module))):
            yield Site(path, "attention", original_class(module).__name__, reason=reason)


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields (path, module, the PreTrainedModel that contains it)."""
    home = sys.modules.get("transformers.modeling_utils")
    if home is None:
        return
    owners: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if isinstance(module, home.PreTrainedModel):
            owners.append((path, module))
        elif _is_attention(module) and not any(map(_is_attention, _inner(module))):
            of = [owner for at, owner in owners if not at or path.startswith(f"{at}.")]
            if of:
                yield path, module, of[-1]


def _inner(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if inner is not module)


def _is_attention(module: nn.Module) -> bool:
    """Whether the module uses the table, or is named attention and has weights."""
    cls = original_class(module)
    if isinstance(module, torch.jit.ScriptModule):
        return False
    named = "attention" in cls.__name__.lower() and next(module.parameters(), None) is not None
    return named or _asks(cls)


def _asks(cls: type[nn.Module]) -> bool:
    """Whether the class's forward looks up the function in transformers' table."""
    try:
        return TABLE in innermost(cls).__code__.co_names
    except Unreadable:
        return False


def _why_not_replaced(module: nn.Module, owner: Any) -> str:
    """Why a module's attention is skipped; empty if it is not."""
    cls, config = original_class(module), config_of(module)
    was = implementation(config)
    if not _asks(cls) or was is None:
        return ASIDE
    if was not in ("sdpa", "eager", NAME):
        return f"its implementation is set to {was}"
    if getattr(config, "output_attentions", False):
        return "output_attentions is set, so attention weights are needed"
    supported = WEIGHTLESS if was == "eager" else (*WEIGHTLESS, "attention_backend")
    if not any(getattr(owner, f"_supports_{what}", False) for what in supported):
        return f"{original_class(owner).__name__} declares support for neither sdpa nor flash"
    for asked in sorted(_asked(cls)):
        names = asked.split(",")
        if (was in names) != (NAME in names):
            return f"its code checks whether the implementation is {' or '.join(names)}"
    return _unlike(module, was)


def _asked(cls: type) -> frozenset[str]:
    """The implementation names, joined, that a class's code compares with.

    Includes its bases, and functions in the same files, which may be given the module.
    """
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    files = ((getattr(sys.modules.get(b.__module__), "__file__", None), b.__name__) for b in bases)
    name_sets = (_compared(file).get(place) for file, name in files if file for place in (name, ""))
    return frozenset().union(*filter(None, name_sets))


@cache
def _compared(file: str) -> dict[str, frozenset[str]]:
    """The names that `_asked` looks up in a file: by class; for functions, under ""."""
    try:
        with open(file, encoding="utf-8") as source:
            tree = syntax_tree(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    names: dict[str, frozenset[str]] = {}
    for top in tree.body:
        place = top.name if isinstance(top, ast.ClassDef) else ""
        names[place] = names.get(place, frozenset()) | frozenset(_names_asked(top))
    return names


def _names_asked(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_implementation(node.left):
            constants = (c for c in ast.walk(node.comparators[0]) if isinstance(c, ast.Constant))
            names = ",".join(c.value for c in constants if isinstance(c.value, str))
            if names:
                yield names


def _is_implementation(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")).endswith("attn_implementation")


# Checks that the function that runs now computes what `attention` does.


def _unlike(module: nn.Module, was: str) -> str:
    """Why the function that runs now differs from `attention`; empty if it does not."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if was == NAME:
        return ""
    table = innermost(original_class(module)).__globals__.get(TABLE)
    if was == "sdpa":
        same = table is not None and table.get(was) is sdpa_attention_forward
        return "" if same else "its module uses another function for sdpa"
    run = eager_function(module)
    if run is None:
        return "its code has no eager_attention_forward"
    try:
        device = device_of(module)
        plain = torch.autocast(device, enabled=False)
        with undisturbed(), torch.no_grad(), quiet(device), plain:
            same = _agree(module, run)
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return f"running its eager attention failed: {one_line(error)}"
    return "" if same else "its eager attention gives different results"


def _agree(module: nn.Module, run: Any) -> bool:
    """Whether both give the same results for a few queries, with and without masks."""
    device = device_of(module)
    device = device if any(not p.is_meta for p in module.parameters()) else "cpu"
    draw = torch.Generator().manual_seed(0)
    more = _passed(module, draw)
    groups = getattr(module, "num_key_value_groups", 1)
    sinks = more.get("s_aux")
    heads = groups * 2 if sinks is None else len(sinks)
    shapes = (2, heads, 5, 8), (2, heads // groups, 5, 8), (2, heads // groups, 5, 8)
    q, k, v = (3 * drawn(draw, *shape).to(device) for shape in shapes)
    seen = torch.rand(2, 1, 5, 5, generator=draw, dtype=F32, device="cpu").to(device) < 0.6
    seen |= torch.eye(5, dtype=torch.bool, device=device)
    numbers = torch.zeros_like(seen, dtype=F32).masked_fill(~seen, torch.finfo(F32).min)
    for theirs, ours, length in ((numbers, seen, 5), (numbers[:, :, -1:], seen[:, :, -1:], 1)):
        args = module, q[:, :, -length:], k, v
        given = _cut(more, length)
        score_options = {k: v for k, v in given.items() if k in SCORES}
        want = run(*args, theirs, scaling=0.5, dropout=0.0, **given)[0]
        got = attend(*args, ours, scaling=0.5, dropout=0.0, **score_options)
        if want.shape != got.shape or not within(got, want, 64 * torch.finfo(F32).eps):
            return False
    return True


def _cut(more: dict[str, Any], length: int) -> dict[str, Any]:
    bias = more.get("position_bias")
    return more if bias is None else {**more, "position_bias": bias[:, :, -length:]}


def _passed(module: nn.Module, draw: torch.Generator) -> dict[str, Any]:
    """The keyword arguments that the module passes to the function, as far as they are its own."""
    values: dict[str, Any] = {}
    for name, source in _keywords(innermost(original_class(module))).items():
        if name == "position_bias":
            heads = 2 * getattr(module, "num_key_value_groups", 1)
            values[name] = drawn(draw, 1, heads, 5, 5).to(device_of(module))
        elif OWN.fullmatch(source):
            value = attrgetter(source.removeprefix("self."))(module)
            values[name] = value.detach() if isinstance(value, Tensor) else value
    return {k: v for k, v in values.items() if k not in ("scaling", "dropout", "is_causal")}


@cache
def _keywords(forward: FunctionType) -> dict[str, str]:
    """name -> source text of the keyword arguments in a forward's attention call."""
    calls = (n for n in ast.walk(parse(forward)) if isinstance(n, ast.Call))
    ours = (c for c in calls if getattr(c.func, "id", "") == "attention_interface")
    return {k.arg: ast.unparse(k.value) for call in ours for k in call.keywords if k.arg}
