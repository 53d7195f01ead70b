"""Attention sites: modules that call the function that their config names.

A transformers model asks `ALL_ATTENTION_FUNCTIONS` for the function at each call. The model gets a
config of its own, which names `attention`; the code of the modules stays as it is.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.patching.config import ATTENTION, configs_in, implementation, own
from fusedops.patching.interface import (
    NAME,
    attend,
    eager_function,
    register_attention,
)
from fusedops.patching.reliance import moved
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.source import Unreadable, innermost, parse
from fusedops.patching.specimen import F32, device_of, quiet, undisturbed
from fusedops.patching.swap import ANY, original_class, said

__all__ = ["attends", "patch_attention"]

TABLE = "ALL_ATTENTION_FUNCTIONS"
ASIDE = "its code does not go through transformers' AttentionInterface"
OWN = re.compile(r"self(\.\w+)+")
MASKED = "sdpa", "flash_attn"  # a mask may be None, where `is_causal` says the rest
SCORES = "position_bias", "softcap", "s_aux"  # what changes them
ALONE = "another attention of the model is left, and takes eager's masks"


@dataclass(frozen=True, eq=False)
class Found:
    """An attention of a model of transformers'. reason: why it is left, empty where it is not."""

    path: str
    module: nn.Module
    owner: Any
    reason: str

    @property
    def config(self) -> Any:
        return _config(self.module) or self.owner.config

    @property
    def was(self) -> str | None:
        return implementation(self.config)


def patch_attention(model: nn.Module, report: PatchReport) -> None:
    """Has the configs of the model name `attention` where every module that reads them can."""
    if gone := moved("attention"):
        report.skipped += _left(model, gone)
        return
    found = _found(model)
    for f in found:
        name = original_class(f.module).__name__
        site = partial(Site, f.path, "attention", f"{name}/{f.was}" if f.was else name)
        if f.reason:
            report.skipped.append(site(reason=f.reason))
        else:
            report.fused.append(site("attention"))
    on = {id(f.config) for f in found if not f.reason}
    if on:
        register_attention()
        used = {id(f.config) for f in found}
        all_on = not any(f.reason for f in found)
        own(model, lambda config: NAME if _named(config, on, used, all_on) else None)


def attends(module: nn.Module) -> bool:
    """Whether it is an attention whose config names ours."""
    config = _config(module)
    return getattr(config, ATTENTION, None) == NAME and _asks(original_class(module))


def _left(model: nn.Module, reason: str) -> Iterator[Site]:
    for path, module in model.named_modules():
        if _is_attention(module) and not any(map(_is_attention, _inner(module))):
            yield Site(path, "attention", original_class(module).__name__, reason=reason)


def _found(model: nn.Module) -> list[Found]:
    """The attentions, those left that could be fused alone included.

    A config is for all that read it. Masks of bools are none for code that adds what it takes for
    eager's, and any config of the model may have made them.
    """
    found = [Found(*one, _obstacle(*one[1:])) for one in _attentions(model)]
    read = {id(f.config): f.reason for f in found if f.reason and f.reason != ASIDE}
    eager = any(f.reason and f.was == "eager" for f in found)
    reasons = (
        f.reason or read.get(id(f.config), "") or (ALONE if eager and f.was == "eager" else "")
        for f in found
    )
    return [replace(f, reason=reason) for f, reason in zip(found, reasons, strict=True)]


def _named(config: Any, on: set[int], used: set[int], all_on: bool) -> bool:
    """Whether a config is to name ours. One that no attention reads follows the others."""
    if id(config) in used:
        return id(config) in on
    return all_on and implementation(config) in ("sdpa", "eager")


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(path, module, the PreTrainedModel that it is in)."""
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
    """It asks the table, or its class calls itself so and has weights."""
    cls = original_class(module)
    if isinstance(module, torch.jit.ScriptModule):
        return False
    named = "attention" in cls.__name__.lower() and next(module.parameters(), None) is not None
    return named or _asks(cls)


def _asks(cls: type[nn.Module]) -> bool:
    """Whether its forward asks transformers' table for the function."""
    try:
        return TABLE in innermost(cls).__code__.co_names
    except Unreadable:
        return False


def _config(module: nn.Module) -> Any:
    """The config that the module reads, None where it has none."""
    return configs_in(module).get("config")


def _obstacle(module: nn.Module, owner: Any) -> str:
    """Why the attention of a module is left, empty where it is not."""
    cls = original_class(module)
    was = implementation(_config(module))
    if not _asks(cls) or was is None:
        return ASIDE
    if was not in ("sdpa", "eager", NAME):
        return f"{was} was chosen"
    if getattr(_config(module), "output_attentions", False):
        return "output_attentions is set: weights are wanted"
    supported = MASKED if was == "eager" else (*MASKED, "attention_backend")
    if not any(getattr(owner, f"_supports_{what}", False) for what in supported):
        return f"{original_class(owner).__name__} says that it supports neither sdpa nor flash"
    for asked in sorted(_asked(cls) | _asked(original_class(owner))):
        names = asked.split(",")
        if (was in names) != (NAME in names):
            return f"its file asks whether the implementation is {' or '.join(names)}"
    return _unlike(module, was)


def _asked(cls: type) -> frozenset[str]:
    """The names, joined, that the file of a class compares the implementation with."""
    home = sys.modules.get(cls.__module__)
    return (
        _compared(home.__file__ or "") if home and getattr(home, "__file__", None) else frozenset()
    )


@cache
def _compared(file: str) -> frozenset[str]:
    try:
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _is_implementation(node.left):
            names = [c.value for c in ast.walk(node.comparators[0]) if isinstance(c, ast.Constant)]
            found.add(",".join(name for name in names if isinstance(name, str)))
    return frozenset(found - {""})


def _is_implementation(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")).endswith("attn_implementation")


# Whether the function that runs now is one that `attention` stands for.


def _unlike(module: nn.Module, was: str) -> str:
    """Why what runs now is not what `attention` computes, empty where it is."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if was == NAME:
        return ""
    table = innermost(original_class(module)).__globals__.get(TABLE)
    if was == "sdpa":
        same = table is not None and table.get(was) is sdpa_attention_forward
        return "" if same else "its file has another function for sdpa"
    run = eager_function(module)
    if run is None:
        return "its code names no eager_attention_forward"
    try:
        device = device_of(module)
        plain = torch.autocast(device, enabled=False)
        with undisturbed(), torch.no_grad(), quiet(device), plain:
            same = _same(module, run)
    except ANY as error:
        return f"its eager attention cannot be run: {said(error)}"
    return "" if same else "its eager attention gives something else"


def _same(module: nn.Module, run: Any) -> bool:
    """Whether both give the same for a few queries, with and without masks."""
    device = device_of(module)
    device = device if any(not p.is_meta for p in module.parameters()) else "cpu"
    draw = torch.Generator().manual_seed(0)
    more = _passed(module, draw)
    groups = getattr(module, "num_key_value_groups", 1)
    sinks = more.get("s_aux")
    heads = groups * 2 if sinks is None else len(sinks)
    shapes = (2, heads, 5, 8), (2, heads // groups, 5, 8), (2, heads // groups, 5, 8)
    q, k, v = (3 * _drawn(draw, *shape).to(device) for shape in shapes)
    seen = torch.rand(2, 1, 5, 5, generator=draw, dtype=F32, device="cpu").to(device) < 0.6
    seen |= torch.eye(5, dtype=torch.bool, device=device)
    numbers = torch.zeros_like(seen, dtype=F32).masked_fill(~seen, torch.finfo(F32).min)
    for theirs, ours, length in ((numbers, seen, 5), (numbers[:, :, -1:], seen[:, :, -1:], 1)):
        args = module, q[:, :, -length:], k, v
        given = _cut(more, length)
        of_scores = {k: v for k, v in given.items() if k in SCORES}
        want = run(*args, theirs, scaling=0.5, dropout=0.0, **given)[0]
        got = attend(*args, ours, scaling=0.5, dropout=0.0, **of_scores)
        if want.shape != got.shape or not _near(got, want):
            return False
    return True


def _drawn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=F32, device="cpu")


def _near(got: Tensor, want: Tensor) -> bool:
    off = (got.double() - want.double()).abs().max()
    return bool(off <= 64 * torch.finfo(F32).eps * want.double().abs().max())


def _cut(more: dict[str, Any], length: int) -> dict[str, Any]:
    bias = more.get("position_bias")
    return more if bias is None else {**more, "position_bias": bias[:, :, -length:]}


def _passed(module: nn.Module, draw: torch.Generator) -> dict[str, Any]:
    """The keyword arguments that the module gives to the function, as far as they are its own."""
    values: dict[str, Any] = {}
    for name, source in _keywords(innermost(original_class(module))).items():
        if name == "position_bias":
            heads = 2 * getattr(module, "num_key_value_groups", 1)
            values[name] = _drawn(draw, 1, heads, 5, 5).to(device_of(module))
        elif OWN.fullmatch(source):
            value = attrgetter(source.removeprefix("self."))(module)
            values[name] = value.detach() if isinstance(value, Tensor) else value
    return {k: v for k, v in values.items() if k not in ("scaling", "dropout", "is_causal")}


@cache
def _keywords(forward: FunctionType) -> dict[str, str]:
    """name -> source of the keyword arguments of the call in a forward."""
    calls = (n for n in ast.walk(parse(forward)) if isinstance(n, ast.Call))
    ours = (c for c in calls if getattr(c.func, "id", "") == "attention_interface")
    return {k.arg: ast.unparse(k.value) for call in ours for k in call.keywords if k.arg}
