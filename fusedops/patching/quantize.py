"""quantize: the linears of a model as QuantizedLinear, and what is left as it is."""

import warnings
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fusedops import notice
from fusedops.functional.quantized_linear import check_format
from fusedops.nn import Linear, QuantizedLinear
from fusedops.patching.core.swap import has_hooks, original_class
from fusedops.patching.report import PatchReport, Site

__all__ = ["HEAD", "check_options", "quantize", "quantized_layer", "sites"]

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
    Raises TypeError when model is not a module or skip no list of names, and ValueError for a
    format or option that there is not. Warns when nothing was quantized.
    """
    notice.give()
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model must be a torch.nn.Module, got {type(model).__name__}")
    options = {"group_size": group_size, "scale": scale}
    options |= {"input_format": input_format, "compute": compute}
    check_options(format, options)
    if isinstance(skip, str) or not isinstance(skip, Collection):
        raise TypeError(f"quantize: skip must be a list of names, got {skip!r}")
    report = PatchReport()
    made: dict[int, QuantizedLinear] = {}  # by the id of a linear, which is kept by the model alone
    for path, linear, was, reason in [
        (path, id(module), original_class(module).__name__, reason)
        for path, module, reason in sites(model, skip)
    ]:
        if reason:
            report.skipped.append(Site(path, "quantize", was, reason=reason))
            continue
        if linear not in made:
            made[linear] = quantized_layer(path, model.get_submodule(path), format, options)
        model.set_submodule(path, made[linear])
        report.fused.append(Site(path, "quantize", was, f"QuantizedLinear, {format}"))
    if not report.fused:
        warnings.warn(f"quantize: nothing was quantized\n{report}", stacklevel=2)
    return report


def check_options(format: str, options: dict[str, Any]) -> None:
    """Raises ValueError where no layer could have them."""
    if format == "fp8" and options["group_size"] is not None:
        got = options["group_size"]
        raise ValueError(f"quantize: group_size of fp8 must be None (one scale per row), got {got}")
    check_format(format, 1, options["group_size"], options["scale"])
    QuantizedLinear(64, 1, device="meta", format=format, **options | {"group_size": None})


def sites(model: nn.Module, skip: Collection[str]) -> Iterator[tuple[str, nn.Linear, str]]:
    """The linears of a model, with the reason to leave each, empty where there is none."""
    left = Left(model, skip)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and not isinstance(module, QuantizedLinear):
            yield path, module, left.why(path, module)


def quantized_layer(path: str, module: Any, format: str, options: dict) -> QuantizedLinear:
    layer = QuantizedLinear.from_linear(module, format, **options)
    layer.path = path
    return layer


class Left:
    """Which linears of a model keep their floats, and why."""

    def __init__(self, model: nn.Module, skip: Collection[str]) -> None:
        self.model, self.skip = model, set(skip)
        self.holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self.holders.setdefault(id(parameter), set()).add(module)
        self.tied = set(_tied_by_name(model))
        self.head = _head(model) if HEAD in self.skip else None
        self.float32 = {name for m in model.modules() for name in _kept_in_float32(m)}
        self.experts = set(_numbers_of_experts(model))

    def why(self, path: str, module: nn.Linear) -> str:
        """The reason to leave a linear, empty where there is none."""
        if not path:
            return "it is the model itself: use QuantizedLinear.from_linear"
        if named := _named(path, self.skip) or (module is self.head and HEAD):
            return f"{named!r} is in skip"
        if original_class(module) not in (nn.Linear, Linear):
            return "its class may do more than nn.Linear"
        if len(self.holders[id(module.weight)]) > 1 or f"{path}.weight" in self.tied:
            return "its weight is tied to another module's"
        if named := _named(path, self.float32):
            return f"the model keeps {named!r} in float32"
        parts = path.split(".")
        if "router" in parts or (parts[-1] == "gate" and module.out_features in self.experts):
            return "it routes tokens to experts"
        return "it has hooks" if has_hooks(module) else ""


def _named(path: str, names: Collection[str]) -> str:
    """That of the names which is the path, or stands in it between dots."""
    return next((name for name in sorted(names) if f".{name}." in f".{path}."), "")


def _head(model: Any) -> nn.Module | None:
    give = getattr(model, "get_output_embeddings", None)
    return give() if callable(give) else None


def _tied_by_name(model: Any) -> Iterator[str]:
    """What transformers is going to tie, which of a model that is being loaded is not tied yet."""
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        yield from pair


def _kept_in_float32(module: nn.Module) -> Iterator[str]:
    for attribute in FLOAT32:
        yield from getattr(module, attribute, None) or ()


def _numbers_of_experts(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        config = getattr(module, "config", None)
        yield from (n for name in EXPERTS if isinstance(n := getattr(config, name, None), int))
