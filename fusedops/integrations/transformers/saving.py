"""Gives a model that `quantize` changed the config and quantizer that from_pretrained would give.

save_pretrained writes the config, and from_pretrained reads in it which layers have codes. fusedops
imports this file after transformers.modeling_utils. The import also makes from_pretrained refuse
codes of layers that the model loads in floats (refusal.py).
"""

import copy
import logging
import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fusedops.functional.quantized_linear import check_format
from fusedops.integrations.transformers import quantization, refusal
from fusedops.integrations.transformers.checkpoint import saved_path
from fusedops.nn import QuantizedExperts, QuantizedLinear
from fusedops.patching.core.config import is_config
from fusedops.patching.core.swap import has_hooks
from fusedops.patching.quantize import HEAD, RECORDERS, experts_sites, sites

__all__ = ["record"]

log = logging.getLogger(__name__)

# `quantization` may be half imported here: it imports transformers, which leads to this file.


def record(model: nn.Module, format: str, options: dict[str, Any], skip: Collection[str]) -> None:
    """Writes which modules are quantized, and how, into the configs of the models in it.

    These are the model itself, if transformers can save it, or the outermost such models in it:
    PEFT's base model, a wrapper's encoder. Each gets a config of its own, because another model may
    share the present one. Layers of another format than the config's are listed one by one.
    """
    for pretrained in dict.fromkeys(_outermost(model)):
        layers = {saved_path(path): m for path, m in _quantized(pretrained)}
        if not layers:
            continue
        earlier = _config_of(pretrained)
        if earlier is not None and not isinstance(earlier, quantization.QuantizationConfig):
            log.warning(
                "quantize: %s is already quantized by %s, whose config save_pretrained writes; "
                "from_pretrained will refuse the codes of fusedops",
                type(pretrained).__name__,
                type(earlier).__name__,
            )
            continue
        given = quantization.QuantizationConfig(format, **options, skip=skip)
        config = copy.deepcopy(earlier if earlier and _describes_any(earlier, layers) else given)
        names = [*(earlier.skip if earlier else ()), *skip]
        config.skip = [
            name for name in dict.fromkeys(names) if not _covers(name, pretrained, layers)
        ]
        config.skip += _floats(pretrained, config)
        same = config.format, config.options()
        config.layers = {p: _settings(m) for p, m in layers.items() if not _is_as(m, *same)}
        _write(model, pretrained, config)


def _outermost(module: nn.Module) -> Iterator[Any]:
    """The PreTrainedModels that are in no other one."""
    if _is_pretrained(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _is_pretrained(module: nn.Module) -> bool:
    home: Any = sys.modules.get("transformers.modeling_utils")
    return home is not None and isinstance(module, home.PreTrainedModel)


def _quantized(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            yield path, module


def _config_of(model: Any) -> Any:
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, dict) and config.get("quant_method") == quantization.NAME:
        return quantization.QuantizationConfig.from_dict(config)
    return config


def _describes_any(config: Any, layers: dict[str, Any]) -> bool:
    return any(_is_as(m, config.format, config.options()) for m in layers.values())


def _weights(module: Any) -> list[Any]:
    return [*module.stacks().values()] if isinstance(module, QuantizedExperts) else [module]


def _is_as(module: Any, format: str, options: dict[str, Any]) -> bool:
    """Whether the module is what quantizing with this format and these options makes."""
    settings = _settings(module)
    if settings["format"] != format or any(
        settings[name] != options[name] for name in ("input_format", "compute")
    ):
        return False
    size, scale = options["group_size"], options["scale"]
    return all(
        (w.group_size, w.scale or check_format(format, w.in_features, None, None)[1])
        == check_format(format, w.in_features, size, scale)
        for w in _weights(module)
    )


def _settings(module: Any) -> dict[str, Any]:
    """The module's format and options, None for the format's defaults."""
    first, *_ = weights = _weights(module)
    usual = [check_format(w.format, w.in_features, None, None)[0] for w in weights]
    plain = usual == [w.group_size for w in weights]
    return {
        "format": module.format,
        "group_size": None if plain else first.group_size,
        "scale": first.scale,
        "input_format": getattr(module, "input_format", None),
        "compute": module.compute,
    }


def _covers(name: str, model: Any, layers: dict[str, Any]) -> bool:
    """Whether a name of skip would skip a layer that is quantized."""
    if name == HEAD and isinstance(model.get_output_embeddings(), QuantizedLinear):
        return True
    return any(f".{name}." in f".{path}." for path in layers)


def _floats(model: nn.Module, config: Any) -> list[str]:
    """The paths of layers in floats that from_pretrained would quantize."""
    linears = [p for p, m, reason in sites(model, config.skip) if not reason or has_hooks(m)]
    experts = experts_sites(model, config.skip, config.options())
    return linears + [path for path, _, gate in experts if not isinstance(gate, str)]


def _write(model: nn.Module, pretrained: Any, config: Any) -> None:
    quantizer = quantization.Quantizer(config, pre_quantized=False)
    _copy_config(model, pretrained)
    pretrained.config.quantization_config = quantizer.quantization_config
    pretrained.hf_quantizer, pretrained.is_quantized = quantizer, True
    pretrained.quantization_method = config.quant_method
    for module in filter(_is_pretrained, pretrained.modules()):
        module.config._is_quantized = True


def _copy_config(model: nn.Module, pretrained: Any) -> None:
    """Gives the modules a copy of the config and of the configs in it; views stay views."""
    copies: dict[int, Any] = {}
    copy.deepcopy(pretrained.config, copies)
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if is_config(value) and id(getattr(value, "_fusedops_config", value)) in copies:
                vars(module)[name] = copy.deepcopy(value, copies)


RECORDERS["transformers"] = record
refusal.install()
