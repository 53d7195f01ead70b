"""quantize: replaces a model's linears and experts with quantized ones."""

import warnings
from collections.abc import Callable, Collection, Iterator
from operator import call
from typing import Any

from torch import Tensor, nn

from fusedops import notice
from fusedops.functional.quantized_linear import check_format
from fusedops.nn import Linear, QuantizedExperts, QuantizedLinear
from fusedops.nn.quantized_linear.foreign import (
    conv1d,
    is_adapter,
    path_without,
    set_orientation,
    unwrapped,
    why_float,
)
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.swap import has_hooks, original_class
from fusedops.patching.models.experts.gate import Gate
from fusedops.patching.models.experts.quantized import (
    gate_for_codes,
    is_experts,
    quantized_experts,
)
from fusedops.patching.report import PatchReport, Site

__all__ = [
    "HEAD",
    "RECORDERS",
    "check_options",
    "experts_sites",
    "quantize",
    "quantized_layer",
    "sites",
]

# By package: what `quantize` calls last, with the model, the format, the options and skip.
# integrations/ registers it when the package is imported.
RECORDERS: dict[str, Callable[[nn.Module, str, dict[str, Any], Collection[str]], None]] = {}

decides(
    QuantizedLinear.forward,
    "quantize",
    at=lambda layer, x: layer,
    why=lambda layer, x: "",
    repeat=lambda layer, x: Repeat(call, call, (layer, x), {}, (layer,)),
)

decides(
    QuantizedExperts.forward,
    "quantize",
    at=lambda experts, *args: experts,
    why=lambda experts, *args: "",
    repeat=lambda experts, *args: Repeat(call, call, (experts, *args), {}, (experts,)),
)

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
    """Replaces the linears and experts of `model` with quantized ones, in place, one by one.

    Each float weight is freed when its codes exist, so the extra memory is one layer's. This cannot
    be undone: unpatch keeps quantized layers. Experts are those of transformers' ExpertsInterface
    whose gate is recognised, as for `patch`; they become QuantizedExperts.

    format and the options: those of `quantize_weight` and `quantized_linear`. skip: names, or
    dot-separated parts of names, of modules to skip with everything inside them; "lm_head" also
    means the model's output embeddings. Also skipped, with a reason in the report: weights that
    another module shares, linears that route to experts, modules that transformers keeps in
    float32, modules with hooks, and subclasses of nn.Linear, which may do more. PEFT's
    adapters and `modules_to_save` stay in floats, and the linear that an adapter wraps is
    quantized. If some linears are frozen, weights that require gradients stay in floats.
    transformers' Conv1D (GPT-2) counts as a linear.

    A transformers model then has the config and quantizer that from_pretrained would give it, so
    that save_pretrained writes a checkpoint that from_pretrained reads. Its config becomes a copy.

    Raises TypeError if model is not a module or skip is not a list of names, and ValueError for an
    invalid format or option. Warns if nothing was quantized.
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
    for path, was, gate in [  # no list of modules: it would keep their floats
        (path, original_class(module).__name__, gate)
        for path, module, gate in experts_sites(model, skip, options)
    ]:
        if isinstance(gate, str):
            report.skipped.append(Site(path, "quantize", was, reason=gate))
            continue
        module = quantized_experts(model.get_submodule(path), gate, format, options)
        model.set_submodule(path, module)
        report.fused.append(Site(path, "quantize", was, f"QuantizedExperts, {format}"))
    layers: dict[int, QuantizedLinear] = {}  # by linear id: only the model keeps it alive
    for path, linear, was, reason in [
        (path, id(module), original_class(module).__name__, reason)
        for path, module, reason in sites(model, skip)
    ]:
        if reason:
            report.skipped.append(Site(path, "quantize", was, reason=reason))
            continue
        if linear not in layers:
            layers[linear] = quantized_layer(path, model.get_submodule(path), format, options)
        model.set_submodule(path, layers[linear])
        if layers[linear].transposed:
            set_orientation(model, path, transposed=False)
        report.fused.append(Site(path, "quantize", was, f"QuantizedLinear, {format}"))
    for record in RECORDERS.values():
        record(model, format, options, skip)
    if not report.fused:
        warnings.warn(f"quantize: nothing was quantized\n{report}", stacklevel=2)
    return report


def check_options(format: str, options: dict[str, Any]) -> None:
    """Raises ValueError if no layer could have these options."""
    if format == "fp8" and options["group_size"] is not None:
        got = options["group_size"]
        raise ValueError(f"quantize: group_size of fp8 must be None (one scale per row), got {got}")
    check_format(format, 1, options["group_size"], options["scale"])
    QuantizedLinear(64, 1, device="meta", format=format, **options | {"group_size": None})


def sites(model: nn.Module, skip: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """Yields each linear's path, module and the reason to skip it (empty if none)."""
    left = SkipRules(model, skip)
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_float_linear(module):
            yield path, module, left.why(path, module)


def experts_sites(
    model: nn.Module, skip: Collection[str], options: dict[str, Any]
) -> Iterator[tuple[str, nn.Module, Gate | str]]:
    """Yields the path and module of experts in floats, and their gate or why they are skipped."""
    left = SkipRules(model, skip)
    for path, module in model.named_modules():
        if is_experts(module):
            yield path, module, left.why_experts(path, module) or gate_for_codes(module, options)


def quantized_layer(path: str, module: Any, format: str, options: dict) -> QuantizedLinear:
    layer = QuantizedLinear.from_linear(module, format, **options)
    layer.path = path
    return layer


class SkipRules:
    """The rules for which linears and experts of a model stay unquantized."""

    def __init__(self, model: nn.Module, skip: Collection[str]) -> None:
        self.model, self.skip = model, set(skip)
        self.holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                self.holders.setdefault(id(parameter), set()).add(module)
        self.tied = set(_tied_by_name(model))
        self.head = unwrapped(_head(model)) if HEAD in self.skip else None
        self.partly_frozen = _partly_frozen(model)
        self.float32 = {name for m in model.modules() for name in _kept_in_float32(m)}
        self.experts = set(_numbers_of_experts(model))

    def why(self, path: str, module: Any) -> str:
        """The reason to skip a linear, or an empty string."""
        if not path:
            return "it is the model itself: use QuantizedLinear.from_linear"
        if named := _named(path, self.skip) or (module is self.head and HEAD):
            return f"{named!r} is in skip"
        if reason := self._why_trained(path, [getattr(module, "weight", None)]):
            return reason
        if original_class(module) not in (nn.Linear, Linear, *conv1d()):
            return "its class may do more than nn.Linear"
        if len(self.holders[id(module.weight)]) > 1 or f"{path}.weight" in self.tied:
            return "its weight is tied to another module's"
        if named := _named(path, self.float32):
            return f"the model keeps {named!r} in float32"
        parts = path_without(self.model, path).split(".")
        rows = getattr(module, "out_features", None)
        if "router" in parts or (parts[-1] == "gate" and rows in self.experts):
            return "it routes tokens to experts"
        return "it has hooks" if has_hooks(module) else ""

    def why_experts(self, path: str, module: nn.Module) -> str:
        """The reason to skip an experts module, apart from its code; empty if there is none."""
        if not path:
            return "it is the model itself"
        if named := _named(path, self.skip):
            return f"{named!r} is in skip"
        if reason := self._why_trained(path, [*module.parameters()]):
            return reason
        if any(len(self.holders[id(p)]) > 1 for p in module._parameters.values() if p is not None):
            return "its weight is tied to another module's"
        if named := _named(path, self.float32):
            return f"the model keeps {named!r} in float32"
        return "it has hooks" if has_hooks(module) else ""

    def _why_trained(self, path: str, weights: Collection[Tensor | None]) -> str:
        """The reason to leave a module to training; empty if nobody chose to train it."""
        if is_adapter(self.model, path):
            return "it is part of a PEFT adapter"
        if self.partly_frozen and any(w is not None and w.requires_grad for w in weights):
            return "it is trained, unlike other linears, which are frozen"
        return why_float(self.model, path)


def _is_float_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, *conv1d())) and not isinstance(module, QuantizedLinear)


def _partly_frozen(model: nn.Module) -> bool:
    """Whether somebody froze linears; weights on meta are not loaded yet, so nobody did.

    Other frozen parameters show nothing: Whisper's constructor freezes its position embeddings.
    """
    linears = (m for m in model.modules() if _is_float_linear(m) or isinstance(m, QuantizedLinear))
    parameters = [p for m in linears for p in m._parameters.values() if p is not None]
    experts = (p for m in model.modules() if is_experts(m) for p in m.parameters())
    loaded = (p for p in (*parameters, *experts) if p.is_floating_point() and not p.is_meta)
    return any(not p.requires_grad for p in loaded)


def _named(path: str, names: Collection[str]) -> str:
    """The first name that equals the path or is a dot-separated part of it."""
    return next((name for name in sorted(names) if f".{name}." in f".{path}."), "")


def _head(model: Any) -> nn.Module | None:
    give = getattr(model, "get_output_embeddings", None)
    return give() if callable(give) else None


def _tied_by_name(model: Any) -> Iterator[str]:
    """The names that transformers will tie, which are not yet tied while a model loads."""
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        yield from pair


def _kept_in_float32(module: nn.Module) -> Iterator[str]:
    for attribute in FLOAT32:
        yield from getattr(module, attribute, None) or ()


def _numbers_of_experts(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        config = getattr(module, "config", None)
        yield from (n for name in EXPERTS if isinstance(n := getattr(config, name, None), int))
