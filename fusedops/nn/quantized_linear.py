"""QuantizedLinear: torch.nn.Linear with a weight of 4 or 8 bits."""

import copy
import json
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusedops.backends import forced, takes, unavailable
from fusedops.extension import _C
from fusedops.functional.linear import ACTIVATIONS
from fusedops.functional.quantized_linear import (
    NF4_BLOCK,
    QuantizedWeight,
    check_format,
    dequantize_weight,
    product,
    quantize_weight,
    scales_name,
)

__all__ = ["QuantizedLinear"]

log = logging.getLogger(__name__)


class QuantizedLinear(torch.nn.Linear):
    """torch.nn.Linear whose weight is codes and scales: see `fusedops.functional.quantized_linear`.

    The state dict holds them as plain tensors: qweight, scales (of nf4 absmax), zeros (of int4),
    and bias. A checkpoint with a float `weight` is quantized as it is loaded, and one of
    bitsandbytes' Linear4bit is taken as it is by nf4, unless its absmax are quantized as well.
    Moves take the codes along, casts leave them: `dtype`, the bias and what `weight` looks like
    follow. There is no gradient of the weight; the input and the bias have theirs, in train and in
    eval. The arguments are torch.nn.Linear's, then those of quantize_weight and quantized_linear.

    What is written to `weight.data`, as peft's merge does, is quantized anew, and the log says how
    far the codes are from it. The codes of before stay beside the new ones: taking away from
    `weight.data` just what was added gives them back, bit for bit. `forget()` drops them, as do
    load_state_dict and `weight = ...`, which quantizes as well.
    """

    dtype: torch.dtype
    qweight: Tensor
    path: str = ""  # in the model that it was made for

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        format: str = "int8",
        group_size: int | None = None,
        scale: str | None = None,
        activation: str | None = None,
        input_format: str | None = None,
        compute: str | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.format = format
        self.group_size, self.scale = check_format(format, in_features, group_size, scale)
        if activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"QuantizedLinear: activation must be one of {known}, got {activation!r}"
            )
        self.activation, self.input_format, self.compute = activation, input_format, compute
        self._before: list[QuantizedWeight] = []  # the last is what the last write replaced
        empty = torch.empty(out_features, in_features, device="meta")
        # Shapes alone: "mse" has the same ones and takes many times as long.
        tensors = quantize_weight(empty, format, group_size=group_size, scale="absmax").tensors()
        for name, t in tensors.items():
            self.register_buffer(name, torch.empty(t.shape, dtype=t.dtype, device=device))
        own = torch.empty(out_features, device=device, dtype=dtype)
        self.dtype = own.dtype
        self.register_parameter("bias", torch.nn.Parameter(own) if bias else None)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        format: str,
        *,
        group_size: int | None = None,
        scale: str | None = None,
        activation: str | None = None,
        input_format: str | None = None,
        compute: str | None = None,
    ) -> "QuantizedLinear":
        """The same layer with its weight quantized. Its bias is the same parameter."""
        new = cls(
            linear.in_features,
            linear.out_features,
            bias=False,
            device="meta",
            dtype=linear.weight.dtype,
            format=format,
            group_size=group_size,
            scale=scale,
            activation=activation,
            input_format=input_format,
            compute=compute,
        )
        if not linear.weight.is_meta:
            new._set(new._quantized(linear.weight))
        new.bias = linear.bias
        return new.train(linear.training)

    def reset_parameters(self) -> None:
        """torch.nn.Linear's numbers, quantized."""
        device = self.qweight.device
        if device.type == "meta":
            return
        weight = torch.empty(self.out_features, self.in_features, device=device)
        if weight.numel():
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        self._set(self._quantized(weight))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        how = self.activation, self.input_format, self.compute
        return product(input, self._operands(), self.bias, self._layout(), *how)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        return QuantizedWeight(*self._layout(), *self._operands())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [N, K] in `dtype`, to be read. Its numbers are made by what asks for them;
        dtype, shape and device cost nothing. Its `data` can be written to.
        """
        return DequantizedWeight(self)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if not (isinstance(value, DequantizedWeight) and value._layer is self):
            self._write(value)
        self.forget()

    def forget(self) -> None:
        """Frees the codes that writes to `weight.data` replaced: there is no unmerge after that."""
        self._before.clear()

    def explain(self, rows: int) -> str:
        """Which code runs for so many rows of input in `dtype`, and why. Raises ValueError for
        fewer than none.
        """
        if rows < 0:
            raise ValueError(f"QuantizedLinear.explain: rows must be 0 or more, got {rows}")
        format, n, k, _ = self._layout()
        dtype, device = self.dtype, self.qweight.device.type
        asked = forced() if device in ("cpu", "cuda") else None
        what = f"{rows} rows of {_short(dtype)} by {format} [{n}, {k}] on {device}"
        if asked:
            what += f", where backend {asked!r} is forced"
            if not takes(asked, device):
                return f"{what}: an error, as that takes no tensors on {device}"
        if dtype != torch.float64 and (plan := self._plan(asked or device, rows)):
            return f"{what}: {plan}"
        wide = torch.promote_types(dtype, torch.float32)
        given = dtype if self.compute is None and self.input_format is None else wide
        operands = torch.bfloat16 if self.compute == "bf16" and wide == torch.float32 else given
        return (
            f"{what}: ATen calls, as there is no kernel for these. Each call makes the weight in "
            f"{_short(wide)}, {n * k * wide.itemsize >> 20} MiB, whatever the rows, and torch "
            f"multiplies {_short(operands)}"
        )

    def _plan(self, runner: str, rows: int) -> str:
        """The kernel of a device or of a backend in words; empty where it has none."""
        how = self.input_format or "none", self.compute or "any"
        if runner == "cpu":
            return _C.quantized_linear_plan(*self._layout(), rows, *how)
        if runner not in ("cuda", "triton", "simt"):
            return ""
        has_gemv = runner != "triton" and not unavailable("quantized_linear", runner)
        while _C.quantized_linear_way(rows, *how) == "gemv" and not has_gemv:
            rows += 1  # the next kernel takes these as well
        gemv = _C.quantized_linear_way(rows, *how) == "gemv"
        runs = gemv or (runner != "simt" and not unavailable("quantized_linear", "triton"))
        return _C.quantized_linear_gpu_plan(*self._layout(), rows, *how) if runs else ""

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, format={self.format!r}, group_size={self.group_size}"
        options = ("activation", "input_format", "compute")
        given = ((name, getattr(self, name)) for name in options)
        return text + "".join(f", {name}={value!r}" for name, value in given if value is not None)

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        held: dict[str, Any] = self._buffers
        return held["qweight"], held[scales_name(self.format)], held.get("zeros")

    def _layout(self) -> tuple[str, int, int, int]:
        return self.format, self.out_features, self.in_features, self.group_size

    def _quantized(self, weight: Tensor) -> QuantizedWeight:
        size = self.group_size
        return quantize_weight(weight, self.format, group_size=size, scale=self.scale)

    def _set(self, weight: QuantizedWeight) -> None:
        for name, tensor in weight.tensors().items():
            setattr(self, name, tensor)

    def _numbers(self) -> Tensor:
        """The weight in float32, or float64, before `dtype` rounds it."""
        acc = torch.promote_types(self.dtype, torch.float32)
        return dequantize_weight(self.quantized_weight, acc)

    @torch.no_grad()
    def _write(self, target: Tensor) -> None:
        """The codes of another weight, in place, and a line in the log of what that costs."""
        if target.shape != self.weight.shape:
            wanted, got = list(self.weight.shape), list(target.shape)
            raise ValueError(f"QuantizedLinear: weight must be {wanted}, got {got}")
        before = self._numbers()
        self._before = [*self._before[1 - MOST_BEFORE :], copy.deepcopy(self.quantized_weight)]
        self._put(self._quantized(target.to(before.device)))
        off = (self._numbers() - target).norm()
        log.warning(
            "%s: the weight that was written is quantized anew to %s, and off by %.2g of its size "
            "and %.2g of what was changed",
            self.path or repr(self),
            self.format,
            off / target.norm(),
            off / (target - before).norm(),
        )

    def _put(self, weight: QuantizedWeight) -> None:
        for name, tensor in weight.tensors().items():
            self._buffers[name].copy_(tensor)  # type: ignore[union-attr]

    @torch.no_grad()
    def _add(self, change: Tensor, alpha: float) -> None:
        """weight + alpha change. Where that takes back what the last write added, its codes."""
        change = change.to(self.dtype)
        if self._before and self._gives_these_codes(self._before[-1], -alpha * change):
            self._put(self._before.pop())
        else:
            self._write(self._numbers() + alpha * change)

    def _gives_these_codes(self, before: QuantizedWeight, change: Tensor) -> bool:
        """Whether before + change is what is here. The sum is rounded to dtype or is not: peft's
        merge adds to the weight, its safe_merge to a copy of it.
        """
        now = self.quantized_weight.tensors()
        for dtype in {self.dtype, torch.promote_types(self.dtype, torch.float32)}:
            merged = dequantize_weight(before.to(change.device), dtype) + change
            then = self._quantized(merged).tensors()
            if all(torch.equal(_bytes(t), _bytes(then[name])) for name, t in now.items()):
                return True
        return False

    def _apply(self, fn, recurse=True):
        """As torch's, but that codes and scales pass as bytes, which a cast of floats leaves."""
        names = ["qweight", scales_name(self.format), "zeros"]
        held: dict[str, Any] = self._buffers
        own = {name: held[name] for name in names if name in held}
        example = torch.empty(1, dtype=self.dtype, device=self.qweight.device)
        as_bytes = {name: _bytes(t) for name, t in own.items()}
        held.update(as_bytes)
        try:
            super()._apply(fn, recurse)
            self.dtype = fn(example).dtype
        finally:
            for name, t in own.items():
                if held[name].dtype != torch.uint8:  # Module.type casts integers as well
                    held[name] = as_bytes[name].to(held[name].device)
                held[name] = held[name].view(t.dtype).view(t.shape)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.is_floating_point():
            del state_dict[f"{prefix}weight"]
            tensors = self._quantized(weight.to(self.qweight.device)).tensors()
            state_dict.update({f"{prefix}{name}": t for name, t in tensors.items()})
        elif self.format == "nf4" and _is_bitsandbytes(state_dict, f"{prefix}weight"):
            state_dict[f"{prefix}qweight"] = state_dict.pop(f"{prefix}weight")
            state_dict[f"{prefix}absmax"] = state_dict.pop(f"{prefix}weight.absmax")
            for name in (QUANT_STATE, "quant_map"):
                del state_dict[f"{prefix}weight.{name}"]
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.forget()
        if self.bias is not None:  # with assign=True it may be another one
            self.dtype = self.bias.dtype


MOST_BEFORE = 8  # adapters that are merged into one layer
QUANT_STATE = "quant_state.bitsandbytes__nf4"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_bitsandbytes(state_dict: dict[str, Tensor], name: str) -> bool:
    """Whether these are the tensors of a Linear4bit that has our blocks and plain absmax."""
    if not {f"{name}.absmax", f"{name}.quant_map", f"{name}.{QUANT_STATE}"} <= state_dict.keys():
        return False
    state = json.loads(bytes(state_dict[f"{name}.{QUANT_STATE}"].tolist()))
    return state["blocksize"] == NF4_BLOCK and state_dict[f"{name}.absmax"].is_floating_point()


class DequantizedWeight(Tensor):
    """A quantized weight to who reads it: an operation on it gets the dequantized numbers, which
    are made each time. Only its `data` can be written to, as a whole: that is quantized anew.
    """

    _layer: QuantizedLinear
    _quantized: QuantizedWeight
    _written: bool  # whether it is `data`

    @staticmethod
    def __new__(cls, layer: QuantizedLinear, written: bool = False) -> "DequantizedWeight":
        weight = layer.quantized_weight
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        view = make(cls, weight.shape, dtype=layer.dtype, device=weight.qweight.device)
        # What others noted on the codes: transformers, that they are loaded and not to be drawn.
        view.__dict__.update(weight.qweight.__dict__)
        view._layer, view._quantized, view._written = layer, weight, written
        return view

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> "DequantizedWeight":  # type: ignore[override]
        return DequantizedWeight(self._layer, written=True)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not (isinstance(value, DequantizedWeight) and value._layer is self._layer):
            self._layer._write(value)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        views = [given[name] for name in changed if isinstance(given.get(name), cls)]
        if views:
            return views[0]._changed(func, args, kwargs)
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._layer)
        args, kwargs = tree_map_only(cls, _numbers, (args, kwargs))
        return func(*args, **kwargs)

    def _changed(self, func, args, kwargs) -> "DequantizedWeight":
        """An operation in place, on the numbers in float32 where it is a sum."""
        if not self._written or args[0] is not self:
            raise RuntimeError(
                "QuantizedLinear: weight is a view to be read, its numbers are codes; "
                "load_state_dict quantizes a float weight, and so do writes to weight.data"
            )
        others, kwargs = tree_map_only(DequantizedWeight, _numbers, (args[1:], kwargs))
        sign = {torch.ops.aten.add_.Tensor: 1, torch.ops.aten.sub_.Tensor: -1}.get(func)
        if sign and not kwargs and others[0].shape == self.shape:
            self._layer._add(others[0], sign)
        else:
            numbers = self._layer._numbers()
            func(numbers, *others, **kwargs)
            self._layer._write(numbers)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DequantizedWeight({self._quantized.format}, {_numbers(self)})"


def _numbers(view: DequantizedWeight) -> Tensor:
    return dequantize_weight(view._quantized, view.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
