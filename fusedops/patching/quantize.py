"""quantize: the linears of a model as QuantizedLinear, and what is left as it is."""

import warnings
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fusedops.functional.quantized_linear import check_format
from fusedops.nn import Linear, QuantizedLinear
from fusedops.patching.report import PatchReport, Site
from fusedops.patching.swap import has_hooks, original_class

__all__ = ["quantize"]

HEAD = "lm_head"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FLOAT32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def quantize(
    model: nn.Module,
    format: str,
    *,
    skip: Collection[str] = (HEAD,),
    group_size: int | None = None,
    scale: str | None = None,
    input_format: str | None = None,
    compute: str | None = None,
) -> PatchReport:
    """Replaces the linears of `model` by QuantizedLinears, in place, one after the other.

    The float weights go as their codes come, so the memory that it takes beside the model is that
    of one layer. There is no way back: unpatch leaves quantized layers.

    format and the options: those of `quantize_weight` and `quantized_linear`. skip: names, or parts
    of names between dots, of modules that are left with all that is in them; "lm_head" stands for
    the model's output embeddings too. Left as well are weights that another module shares, linears
    that choose experts, what transformers keeps in float32, modules with hooks, and subclasses of
    nn.Linear, which may do more. The report says so of each.
    Raises TypeError when model is not a module and ValueError for a format or option that there is
    not. Warns when nothing was quantized.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model must be a torch.nn.Module, got {type(model).__name__}")
    check_format(format, 1, None if format == "fp8" else group_size, scale)
    options = {"group_size": group_size, "scale": scale}
    options |= {"input_format": input_format, "compute": compute}
    report, left, done = PatchReport(), Left(model, skip), {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.Linear) or isinstance(module, QuantizedLinear):
            continue
        was = original_class(module).__name__
        if reason := left.why(path, module):
            report.skipped.append(Site(path, "quantize", was, reason=reason))
            continue
        if module not in done:
            done[module] = _quantized(module, format, options)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, done[module])
        report.fused.append(Site(path, "quantize", was, f"QuantizedLinear, {format}"))
    if not report.fused:
        warnings.warn(f"quantize: nothing was quantized\n{report}", stacklevel=2)
    return report


def _quantized(module: Any, format: str, options: dict[str, Any]) -> QuantizedLinear:
    activation = module.activation if original_class(module) is Linear else None
    return QuantizedLinear.from_linear(module, format, activation=activation, **options)


class Left:
    """Which linears of a model keep their floats, and why."""

    def __init__(self, model: nn.Module, skip: Collection[str]) -> None:
        self.model, self.skip = model, set(skip)
        self.holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self.holders.setdefault(id(parameter), set()).add(module)
        self.head = _head(model) if HEAD in self.skip else None
        self.float32 = {name for m in model.modules() for name in _kept_in_float32(m)}
        self.experts = set(_numbers_of_experts(model))

    def why(self, path: str, module: nn.Linear) -> str:
        """The reason to leave a linear, empty where there is none."""
        if not path:
            return "it is the model: QuantizedLinear.from_linear makes another"
        if named := _named(path, self.skip) or (module is self.head and HEAD):
            return f"skip has {named!r}"
        if original_class(module) not in (nn.Linear, Linear):
            return "its class may do more than nn.Linear"
        if len(self.holders[id(module.weight)]) > 1:
            return "its weight is tied to another module's"
        if named := _named(path, self.float32):
            return f"the model keeps {named!r} in float32"
        if path.rpartition(".")[2] in ("router", "gate") and module.out_features in self.experts:
            return "it chooses experts"
        return "it has hooks" if has_hooks(module) else ""


def _named(path: str, names: Collection[str]) -> str:
    """That of the names which is the path, or stands in it between dots."""
    return next((name for name in sorted(names) if f".{name}." in f".{path}."), "")


def _head(model: Any) -> nn.Module | None:
    give = getattr(model, "get_output_embeddings", None)
    return give() if callable(give) else None


def _kept_in_float32(module: nn.Module) -> Iterator[str]:
    for attribute in FLOAT32:
        yield from getattr(module, attribute, None) or ()


def _numbers_of_experts(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        config = getattr(module, "config", None)
        yield from (n for name in EXPERTS if isinstance(n := getattr(config, name, None), int))
