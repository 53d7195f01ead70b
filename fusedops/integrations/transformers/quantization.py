"""Quantized weights in transformers' from_pretrained and save_pretrained.

from_pretrained creates a model without memory, lets the quantizer change it, and reads the
checkpoint. Each float weight is quantized when it is read, so only one layer's floats are in memory
at a time. Codes are loaded unchanged.
"""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, ConversionOps
from transformers.integrations.accelerate import get_device
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fusedops.functional import dequantize_experts, dequantize_weight
from fusedops.functional.quantized_linear import FORMATS, scales_name
from fusedops.integrations.transformers.checkpoint import (
    CODES,
    FLOATS,
    NOTHING,
    RESIZED,
    Checkpoint,
    spellings,
)
from fusedops.nn import Linear, QuantizedExperts, QuantizedLinear
from fusedops.nn.quantized_linear.foreign import set_orientation
from fusedops.nn.quantized_linear.scales import warn_of_scales
from fusedops.patching.models.experts.quantized import quantized_experts
from fusedops.patching.quantize import (
    HEAD,
    check_options,
    experts_sites,
    quantized_layer,
    sites,
)

__all__ = ["QuantizationConfig", "Quantizer", "in_floats"]

log = logging.getLogger(__name__)

NAME = "fusedops"
OPTIONS = ("group_size", "scale", "input_format", "compute")
RESHAPED = "the checkpoint has a weight of another shape"
INITIALIZED = "_is_hf_initialized"  # transformers' mark for tensors that need no initialization


@register_quantization_config(NAME)
class QuantizationConfig(QuantizationConfigMixin):
    """Makes from_pretrained quantize a model as `fusedops.quantize` does.

    The arguments are those of `fusedops.quantize`. They are stored in the model's config and in
    what save_pretrained writes. After loading, skip also lists other modules that were not
    quantized: a head that the checkpoint lacked or that had another shape there. layers: paths of
    modules that have another format or other options, with those; `fusedops.quantize` lists them.
    Raises ValueError for an invalid format or option, and TypeError if skip is not a list.
    """

    def __init__(
        self,
        format: str,
        *,
        group_size: int | None = None,
        scale: str | None = None,
        skip: Any = (HEAD,),
        input_format: str | None = None,
        compute: str | None = None,
        layers: dict[str, dict[str, Any]] | None = None,
        quant_method: str = NAME,
    ) -> None:
        if quant_method != NAME:
            raise ValueError(
                f"QuantizationConfig: quant_method must be {NAME!r}, got {quant_method!r}"
            )
        if isinstance(skip, str):
            raise TypeError(f"QuantizationConfig: skip must be a list of names, got {skip!r}")
        self.quant_method: Any = quant_method
        self.format, self.group_size, self.scale = format, group_size, scale
        self.skip, self.input_format, self.compute = list(skip), input_format, compute
        self.layers = copy.deepcopy(layers or {})
        check_options(format, self.options())
        for path, settings in self.layers.items():
            if "format" not in settings:
                raise ValueError(f"QuantizationConfig: layers[{path!r}] must have a 'format'")
            check_options(*self.of(path))

    def options(self) -> dict[str, Any]:
        """QuantizedLinear's options, except the format."""
        return {name: getattr(self, name) for name in OPTIONS}

    def of(self, *paths: str) -> tuple[str, dict[str, Any]]:
        """The format and the options of a module, by its path or by its path in other classes."""
        listed = [self.layers[path] for path in paths if path in self.layers]
        if not listed:
            return self.format, self.options()
        options: dict[str, Any] = dict.fromkeys(OPTIONS) | listed[0]
        return options.pop("format"), options

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's: transformers expects one in a config that is passed to from_pretrained."""
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        return {
            name: value for name, value in super().to_dict().items() if name != "layers" or value
        }


@register_quantizer(NAME)
class Quantizer(HfQuantizer):
    """Puts QuantizedLinears and QuantizedExperts into a model before its weights are loaded."""

    quantization_config: QuantizationConfig

    def __init__(self, quantization_config: QuantizationConfig, **kwargs) -> None:
        # A copy: additions to skip belong to this model, and the caller may load another.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self.layers: dict[str, QuantizedLinear] = {}  # path -> layer, still to be quantized
        self.left: dict[str, str] = {}  # path -> why it stays in floats
        self.experts: dict[str, QuantizedExperts] = {}  # path -> module, still to be quantized
        self.loaded: dict[str, set[str]] = {}  # path -> the weights that there were
        self.files: list[str] = []  # the checkpoint's; empty if it comes from elsewhere
        self.unplaced: Any = None  # the model, until the checkpoint's codes have their modules
        self.device_map: dict[str, Any] = {}
        self.resized: dict[str, tuple[str, Any, Any]] = {}  # for refusal.py: Checkpoint's

    @property
    def quantized_element_size(self) -> float:
        config = self.quantization_config
        return FORMATS[config.format].bytes_per_element(config.group_size)

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        path, _, name = param_name.rpartition(".")
        if path in self.experts:
            return name in self.experts[path].stacks()
        return name == "weight" and path in self.layers

    def get_quantize_ops(self) -> "Quantize":
        return Quantize(self.layers, self.left, self.experts, self.loaded)

    def update_weight_conversions(self, weight_conversions, *model):
        conversions = super().update_weight_conversions(weight_conversions, *model)
        for conversion in conversions:  # copies that belong to this call
            if hasattr(conversion, "operations"):
                conversion.operations = [Join.of(operation) for operation in conversion.operations]
        if self.unplaced is not None:  # the call of the loader, with the final names
            model, self.unplaced = self.unplaced, None
            self._place(model, conversions)
        return conversions

    def validate_environment(self, *args, device_map=None, **kwargs):
        """Called with the caller's device map, and again with one that "auto" became."""
        if isinstance(device_map, dict):
            self.device_map = device_map
            self._refuse_disk()

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        config = self.quantization_config
        any_format = config.options() | {"input_format": None}
        for path, module, gate in list(experts_sites(model, config.skip, any_format)):
            format, options = config.of(*spellings(path, model))
            if not isinstance(gate, str) and options["input_format"] is None:
                self.experts[path] = quantized_experts(module, gate, format, options)
        twins: dict[nn.Module, QuantizedLinear] = {}
        for path, module, reason in list(sites(model, config.skip)):
            if reason:
                continue
            if module not in twins:
                settings = config.of(*spellings(path, model))
                with torch.device("meta"):
                    twins[module] = quantized_layer(path, module, *settings)
            self.layers[path] = twins[module]
        self.files, self.unplaced = list(checkpoint_files or ()), model
        return model

    def _place(self, model: Any, conversions: list) -> None:
        """Puts a quantized module wherever the checkpoint has codes; without files, everywhere.

        What remains in `layers` and `experts` is quantized when its floats are read.
        """
        modules = self.layers | self.experts
        if self.files:
            checkpoint = Checkpoint(self.files, model, conversions, modules)
            held = {path: checkpoint.holds(path, module) for path, module in modules.items()}
            for what in (FLOATS, CODES):  # of a module with several paths, the file has one
                shared = {module for path, module in modules.items() if held[path] == what}
                held |= {path: what for path, module in modules.items() if module in shared}
            self.resized, model.hf_quantizer = checkpoint.resized, self
            if self.pre_quantized:
                self._check_config(checkpoint, held)
        else:
            held = dict.fromkeys(modules, CODES if self.pre_quantized else FLOATS)
        for path, holds in held.items():
            if holds == FLOATS and not self.pre_quantized:
                continue
            self.layers.pop(path, None)
            self.experts.pop(path, None)
            if holds == CODES:
                _put(model, path, modules[path])
            elif holds == NOTHING:
                self.left[path] = "the checkpoint has no weights for it"
            elif holds == RESIZED:
                self.left[path] = RESHAPED
            else:
                self.left[path] = "the checkpoint has its weights in floats"
        self._refuse_disk()

    def _check_config(self, checkpoint: Checkpoint, held: dict[str, str]) -> None:
        """Raises ValueError if the config says codes, but the files have floats or a part."""
        modules = self.layers | self.experts
        lacking = [p for p, what in held.items() if what == NOTHING and checkpoint.has_part_of(p)]
        if CODES not in held.values():
            lacking += [path for path, what in held.items() if what == FLOATS]
        if lacking:
            path = lacking[0]
            names = " and ".join(f"{path}.{name}" for name, _ in modules[path].named_buffers())
            raise ValueError(
                f"fusedops: the config says that the checkpoint is quantized, but "
                f"{checkpoint.folder} has no {names}. To quantize a checkpoint of floats, remove "
                "quantization_config from its config.json and pass it to from_pretrained"
            )

    def _refuse_disk(self) -> None:
        """Raises ValueError if a float weight would be quantized on its way to the disk."""
        if self.unplaced is not None or not self.device_map:
            return
        for path in [*self.layers, *self.experts]:
            if get_device(self.device_map, f"{path}.weight") == "disk":
                raise ValueError(
                    f"fusedops: device_map puts {path} on the disk, and the checkpoint has its "
                    "weight in floats. Codes can be read from the disk, floats cannot be quantized "
                    "there. Load the model without the disk, call its save_pretrained, and load "
                    "that folder with this device_map"
                )

    def _process_model_after_weight_loading(self, model, **kwargs):
        config = self.quantization_config
        for path in self.experts.keys() & self.loaded.keys():  # one weight of two
            (name,) = self.experts[path].stacks().keys() - self.loaded[path]
            raise ValueError(f"fusedops: the checkpoint has no {path}.{name}")
        unread = dict.fromkeys(
            [*self.layers, *self.experts], "the checkpoint has no weights for it"
        )
        for path, reason in (unread | self.left).items():
            config.skip.append(path)
            log.warning("from_pretrained: %s is not quantized: %s", path, reason)
        self.layers, self.left, self.experts, self.loaded = {}, {}, {}, {}
        self.files, self.device_map, self.resized = [], {}, {}
        for path, module in model.named_modules():
            if isinstance(module, QuantizedExperts):
                _check_experts(path, module)
        for path, layer in _quantized_layers(model):
            _check_loaded(path, layer)
            name = scales_name(layer.format)
            warn_of_scales(f"{path}.{name}", getattr(layer, name))
        return model

    def _dequantize(self, model, dtype=None):
        if isinstance(dtype, str):  # as save_pretrained leaves it in the config
            dtype = getattr(torch, dtype)
        for path, layer in list(_quantized_layers(model)):
            model.set_submodule(path, in_floats(layer, dtype or layer.dtype))
            if layer.transposed:
                set_orientation(model, path, transposed=True)
        mixtures = [(p, m) for p, m in model.named_modules() if isinstance(m, QuantizedExperts)]
        if mixtures:
            with torch.device("meta"):
                plain = type(model)(model.config)  # has transformers' modules, without numbers
            for path, experts in mixtures:
                blank = plain.get_submodule(path)
                floats = _experts_in_floats(experts, blank, dtype or model.dtype)
                model.set_submodule(path, floats)
        return model


class Join(Concatenate):
    """Concatenate that frees each part once it is copied, where torch.cat needs them all at once.

    The whole has memory only where it was written, so it and what is left of the parts take little
    more than the parts did: gate and up of a layer's experts are most of the layer.
    """

    @classmethod
    def of(cls, operation: ConversionOps) -> ConversionOps:
        """The operation, as a Join if it is a plain Concatenate."""
        if type(operation) is not Concatenate:
            return operation
        return cls(operation.dim, operation.num_shards_attribute)

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):  # type: ignore[override]
        given = [input_dict.pop(name) for name in source_patterns if name in input_dict]
        parts = [t for value in given for t in (value if isinstance(value, list) else [value])]
        del given
        shape, dtype = list(parts[0].shape), parts[0].dtype
        shape[self.dim] = sum(t.shape[self.dim] for t in parts)
        for t in parts:
            dtype = torch.promote_types(dtype, t.dtype)
        whole = parts[0].new_empty(shape, dtype=dtype)
        del t
        begin = 0
        while parts:
            part = parts.pop(0)
            whole.narrow(self.dim, begin, part.shape[self.dim]).copy_(part)
            begin += part.shape[self.dim]
        return {self.get_target_pattern(target_patterns): whole}


class Quantize(ConversionOps):
    """Converts a checkpoint's float weight to codes, and puts the quantized module in place."""

    def __init__(
        self,
        layers: dict[str, QuantizedLinear],
        left: dict[str, str],
        experts: dict[str, QuantizedExperts],
        loaded: dict[str, set[str]],
    ) -> None:
        self.layers, self.left, self.experts, self.loaded = layers, left, experts, loaded

    @torch.no_grad()
    def convert(self, input_dict, *patterns, model=None, missing_keys=None, **kwargs):
        converted: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            path, _, stack_name = name.rpartition(".")
            if path in self.experts:
                missing_keys -= {f"{path}.{stack}" for stack in self.experts[path].stacks()}
                converted |= self._experts(model, path, stack_name, weight)
                continue
            path = name.removesuffix(".weight")
            layer = self.layers.get(path)
            if layer is None or layer._misfit(weight.shape, layer.transposed):
                if layer is not None:  # transformers raises, or initializes a new weight
                    self.left[path] = RESHAPED
                    del self.layers[path]
                converted[name] = weight
                continue
            for place in [p for p, other in self.layers.items() if other is layer]:
                _put(model, place, self.layers.pop(place))
                missing_keys.discard(f"{place}.weight")
            tensors = layer.codes_of(weight).tensors()
            converted |= {f"{path}.{part}": tensor for part, tensor in tensors.items()}
        return converted

    def _experts(self, model: Any, path: str, name: str, weight: Tensor) -> dict[str, Tensor]:
        """One weight of experts as codes, by their names; the first puts the module in place."""
        experts = self.experts[path]
        if model.get_submodule(path) is not experts:
            _put_experts(model, path, experts)
        tensors = experts.stacks()[name].quantized(weight).tensors()
        setattr(experts.stacks()[name], INITIALIZED, True)
        self.loaded.setdefault(path, set()).add(name)
        if self.loaded[path] == experts.stacks().keys():
            del self.experts[path]
        return {f"{path}.{name}.{part}": tensor for part, tensor in tensors.items()}


def _put_experts(model: nn.Module, path: str, experts: QuantizedExperts) -> None:
    """Replaces experts in floats, and keeps their biases, which may be loaded."""
    floats: Any = model.get_submodule(path)
    for name in experts.stacks():
        if getattr(experts, f"{name}_bias") is not None:
            setattr(experts, f"{name}_bias", getattr(floats, f"{name}_bias"))
    setattr(experts, INITIALIZED, True)
    model.set_submodule(path, experts)


def _check_experts(path: str, experts: QuantizedExperts) -> None:
    """Raises ValueError if codes are missing."""
    for name, stack in experts.stacks().items():
        for part, t in stack.named_buffers():
            if not t.is_meta and not hasattr(t, INITIALIZED):
                raise ValueError(f"fusedops: the checkpoint has no {path}.{name}.{part}")


def _put(model: nn.Module, path: str, layer: Any) -> None:
    """Replaces the linear at a path with a layer, and keeps its bias, which may be loaded."""
    if isinstance(layer, QuantizedExperts):
        _put_experts(model, path, layer)
        return
    linear: Any = model.get_submodule(path)
    if linear is not layer:
        layer.bias = linear.bias
    setattr(layer, INITIALIZED, True)  # else the model would draw random values for its weight
    model.set_submodule(path, layer)


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    modules = model.named_modules(remove_duplicate=False)
    return ((path, m) for path, m in modules if isinstance(m, QuantizedLinear))


def _check_loaded(path: str, layer: QuantizedLinear) -> None:
    """Raises ValueError if codes are missing. A missing bias becomes zeros."""
    # Buffers on meta are offloaded to disk.
    in_memory = [(name, t) for name, t in layer.named_buffers() if not t.is_meta]
    missing = [name for name, t in in_memory if not hasattr(t, INITIALIZED)]
    if missing:
        names = " and ".join(f"{path}.{name}" for name in missing)
        raise ValueError(
            f"fusedops: the config says that the checkpoint is quantized, but it has no {names}"
        )
    if layer.bias is not None and not hasattr(layer.bias, INITIALIZED):
        nn.init.zeros_(layer.bias)


def in_floats(layer: QuantizedLinear, dtype: torch.dtype) -> nn.Module:
    """The layer with a float weight: an nn.Linear or Conv1D; a Linear if it has an activation."""
    shape, device = (layer.in_features, layer.out_features), layer.qweight.device
    numbers = dequantize_weight(layer.quantized_weight, dtype).to(device)
    linear: Any
    if layer.transposed:
        with torch.device("meta"):
            linear = Conv1D(*shape[::-1])
        numbers = numbers.t().contiguous()
    else:
        options: dict[str, Any] = {"activation": layer.activation} if layer.activation else {}
        linear = (Linear if options else nn.Linear)(*shape, False, "meta", dtype, **options)
    linear.weight = nn.Parameter(numbers, requires_grad=False)
    linear.bias = layer.bias
    return linear.train(layer.training)


def _experts_in_floats(experts: QuantizedExperts, floats: Any, dtype: torch.dtype) -> nn.Module:
    """transformers' module, which is on meta, with the dequantized weights."""
    for name, stack in experts.stacks().items():
        weight = dequantize_experts(stack.quantized_weight, dtype)
        weight = weight.transpose(1, 2).contiguous() if stack.transposed else weight
        setattr(floats, name, nn.Parameter(weight, requires_grad=False))
        if experts._parameters[f"{name}_bias"] is not None:
            setattr(floats, f"{name}_bias", getattr(experts, f"{name}_bias"))
    return floats.train(experts.training)
