"""Finds modules that use transformers' ExpertsInterface, and redirects them to fusedops' `experts`.

A module's gate is recognised by running it, and its whole forward is run once, on three tokens,
against `experts`. The model's config is not changed: the module holds a view of it. Quantized
experts replace the module instead.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.patching.core.config import (
    NAME,
    config_of,
    experts_implementation,
    fit_experts_view,
    gate_of,
    view_of,
)
from fusedops.patching.core.instance import instead
from fusedops.patching.core.probing import bare, device_of, drawn, quiet, undisturbed, within
from fusedops.patching.core.source import innermost
from fusedops.patching.core.swap import one_line, original_class
from fusedops.patching.models.experts.gate import Gate, recognised
from fusedops.patching.models.experts.interface import fused_experts, register_experts
from fusedops.patching.models.transformers_api import missing_api
from fusedops.patching.report import PatchReport, Site

__all__ = [
    "REPLACED",
    "chooses",
    "gate_or_reason",
    "is_experts",
    "patch_experts",
    "stand_in",
    "why_experts_off",
    "why_unlike",
]

FLAGS = "has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"
KNOWN = "eager", "grouped_mm", "batched_mm", NAME
TOKENS, CHOICES = 3, 2
REPLACED = "its forward is replaced on the instance"


def patch_experts(model: nn.Module, report: PatchReport) -> None:
    """Routes every experts module whose gate is recognised to `experts`."""
    gone = missing_api("experts")
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        was = experts_implementation(config_of(module))
        name = original_class(module).__name__
        site = Site(path, "experts", f"{name}/{was}" if was else name)
        reason = gone or _why_not_replaced(module, was)
        gate = None if reason else gate_or_reason(module, _with_numbers(module))
        if isinstance(gate, Gate):
            register_experts()
            fit_experts_view(module, gate)
            report.fused.append(replace(site, now=gate.name))
        else:
            report.skipped.append(replace(site, reason=reason or str(gate)))


def chooses(module: nn.Module) -> bool:
    """Whether the module's config names our experts, and patch recognised its gate."""
    config = vars(module).get("config")
    named = getattr(config, "_experts_implementation", None) == NAME
    return named and gate_of(module) is not None


def why_experts_off(module: nn.Module) -> str:
    """Why the config of a fused experts module no longer names ours; empty if it does."""
    if chooses(module):
        return ""
    view = view_of(module)
    if view is None:
        return "it is no longer fused"
    return f"the implementation was set to {view._experts_implementation} after patch"


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' use_experts_implementation made the class."""
    attributes = vars(module)
    return all(flag in attributes for flag in FLAGS) and hasattr(type(module), "_apply_gate")


def _why_not_replaced(module: Any, was: str | None) -> str:
    if config_of(module) is None or was is None:
        return "its config names no experts implementation"
    if was not in KNOWN:
        return f"its implementation is set to {was}"
    return REPLACED if instead(module) else why_unlike(module)


def why_unlike(module: Any) -> str:
    """Why neither `experts` nor quantized experts can stand for the module; empty if they may."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = getattr(module, name, None)
        if not isinstance(weight, Tensor) or weight.dim() != 3:
            return f"its {name} is not a tensor of three dimensions"
        if not weight.is_floating_point() or weight.dtype.itemsize < 2:
            return f"its {name} is {str(weight.dtype).removeprefix('torch.')}"
    return ""


def _with_numbers(module: Any) -> Any:
    """The module, or a stand-in if its weights are on the meta device or sharded by FSDP2."""
    weight = module.down_proj
    return stand_in(module) if weight.is_meta or hasattr(weight, "full_tensor") else module


def gate_or_reason(module: Any, weighted: Any) -> Gate | str:
    """The module's gate, or why it is not fused. weighted: a copy whose weights have numbers."""
    try:
        device = device_of(module)
        plain = torch.autocast(device, enabled=False)
        with undisturbed(), torch.no_grad(), quiet(device), plain:
            gate = recognised(module, device)
            if gate is None:
                return "its gate is not one that `experts` has"
            return gate if _agree(weighted, gate) else "its forward gives different results"
    except Exception as error:  # noqa: BLE001  a model's own code raises anything
        return f"running it failed: {one_line(error)}"


def _agree(module: Any, gate: Gate) -> bool:
    """Whether the module's eager forward and `experts` give the same for three tokens."""
    draw = torch.Generator().manual_seed(0)
    weight = module.down_proj
    width = weight.shape[2 if module.is_transposed else 1]
    hidden = drawn(draw, TOKENS, width).to(weight)
    # Under expert parallelism the weight says how many experts there are, the module its own.
    count = min(weight.shape[0], getattr(module, "num_experts", weight.shape[0]))
    index = torch.arange(TOKENS * CHOICES, device=weight.device).view(TOKENS, CHOICES) % count
    weights = drawn(draw, TOKENS, CHOICES).abs().to(weight)
    eager = innermost(original_class(module))(module, hidden, index, weights)
    fused = fused_experts(module, gate, hidden, index, weights)
    alike = fused.shape == eager.shape and fused.dtype == eager.dtype
    if alike and not bool(eager.abs().max() > 0):  # weights of zeros say nothing
        return bool((fused == eager).all())
    return alike and within(fused, eager, 16 * torch.finfo(weight.dtype).eps)


def stand_in(module: Any) -> nn.Module:
    """A copy with random weights in the memory of one expert: each begins one element later."""
    twin, draw = bare(module), torch.Generator().manual_seed(0)
    twin._parameters = {
        name: None if p is None else nn.Parameter(_random(draw, p), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return twin


def _random(draw: torch.Generator, like: Tensor) -> Tensor:
    experts, *shape = like.shape
    per_expert = math.prod(shape)
    numbers = drawn(draw, per_expert + experts) * like.shape[-1] ** -0.5
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return numbers.as_strided((experts, *shape), (1, *strides))
