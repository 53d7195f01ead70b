"""Defines QuantizedLinear: torch.nn.Linear with a 4- or 8-bit weight."""

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.backends import forced, takes, unavailable
from fusedops.extension import _C
from fusedops.functional.quantized_linear import (
    QuantizedWeight,
    check_format,
    dequantize_weight,
    product,
    quantize_weight,
    scales_name,
)
from fusedops.functional.quantized_rows import QuantizedRows
from fusedops.nn.linear import Linear, check_activation
from fusedops.nn.quantized_linear.codes import Codes, bytes_of
from fusedops.nn.quantized_linear.foreign import LOADS, conv1d, take_bitsandbytes, take_zeros
from fusedops.nn.quantized_linear.scales import warn_of_scales
from fusedops.nn.quantized_linear.weight import DequantizedWeight
from fusedops.nn.quantized_linear.writes import Write, undone
from fusedops.references.linear import ACTIVATIONS
from fusedops.references.quantized_linear import SHARES

__all__ = ["QuantizedLinear"]

log = logging.getLogger(__name__)


class QuantizedLinear(Codes, torch.nn.Linear):
    """torch.nn.Linear with a quantized weight; see `fusedops.functional.quantized_linear`.

    The arguments are torch.nn.Linear's, then those of quantize_weight and quantized_linear. input:
    [..., in_features]; the output is [..., out_features] in input's dtype, or autocast's. The input
    and the bias get gradients in train and eval mode; the weight gets none. input may also be a
    pair (codes, scale), from a norm's or swiglu's `output_format`; the output is in `dtype`. A pair
    raises RuntimeError if it or the bias would need a gradient, so call it under torch.no_grad().

    The state dict stores plain tensors: qweight, scales (nf4: absmax), zeros (int4 only) and bias.
    Loading a checkpoint with a float `weight` quantizes it. nf4 layers also load bitsandbytes'
    Linear4bit unchanged, unless its absmax are quantized too. Checkpoints of GPTQ and AWQ raise
    RuntimeError, which names what loads. Loading warns if scales are not finite. Moving the module
    moves the codes. Casting it does not change the codes: it changes only `dtype`, the bias and the
    dtype of `weight`.

    Writes to `weight.data`, as in peft's merge, re-quantize the weight and log the error. The layer
    keeps the previous codes, and a write that undoes the last one restores them bit for bit, as
    peft's unmerge does whatever the method. `forget()`, load_state_dict and assignments to `weight`
    drop them. Such an assignment also quantizes. Raises ValueError for an invalid option.
    """

    dtype: torch.dtype
    qweight: Tensor
    path: str = ""  # the layer's name in its model, for messages
    transposed: bool = False  # whether a checkpoint's float weight is [in, out], as Conv1D's

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
        check_activation("QuantizedLinear", activation, ACTIVATIONS)
        self.activation, self.input_format, self.compute = activation, input_format, compute
        self._before: list[Write] = []  # the writes that can be undone, newest last
        empty = torch.empty(out_features, in_features, dtype=torch.float32, device="meta")
        # Only shapes matter here; "mse" has the same ones and is much slower.
        template = quantize_weight(empty, format, group_size=group_size, scale="absmax")
        # A call with no rows, so that the operator checks the options.
        operands = template.qweight, template.scales, template.zeros
        product(empty[:0], operands, None, self._layout(), activation, input_format, compute)
        for name, t in template.tensors().items():
            self.register_buffer(name, torch.empty(t.shape, dtype=t.dtype, device=device))
        bias_values = torch.empty(out_features, device=device, dtype=dtype)
        self.dtype = bias_values.dtype
        self.register_parameter("bias", torch.nn.Parameter(bias_values) if bias else None)
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
        """Quantizes a linear layer's weight. The new layer shares the bias parameter.

        linear: a torch.nn.Linear, or transformers' Conv1D, whose weight is [in, out]; the new layer
        then loads float weights of that shape. A fusedops Linear keeps its activation if none is
        given. Raises TypeError for another layer.
        """
        if not isinstance(linear, (torch.nn.Linear, *conv1d())):
            got = type(linear).__name__
            raise TypeError(
                f"QuantizedLinear.from_linear: linear must be a torch.nn.Linear, got {got}"
            )
        transposed = isinstance(linear, conv1d())
        weight: Tensor = linear.weight.t() if transposed else linear.weight
        if activation is None and isinstance(linear, Linear | QuantizedLinear):
            activation = linear.activation
        out_features, in_features = weight.shape
        new = cls(
            in_features,
            out_features,
            bias=False,
            device="meta",
            dtype=weight.dtype,
            format=format,
            group_size=group_size,
            scale=scale,
            activation=activation,
            input_format=input_format,
            compute=compute,
        )
        new.transposed = transposed or getattr(linear, "transposed", False)
        if not weight.is_meta:
            new._take_codes(new._quantized(weight).tensors())
        new.bias = linear.bias
        return new.train(linear.training)

    def reset_parameters(self) -> None:
        """Draws torch.nn.Linear's initial values and quantizes them."""
        device = self.qweight.device
        if device.type == "meta":
            return
        shape = self.out_features, self.in_features
        weight = torch.empty(shape, dtype=self.dtype, device=device)
        if weight.numel():
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        self._take_codes(self._quantized(weight).tensors())
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor | QuantizedRows) -> Tensor:
        options = self.activation, self.input_format, self.compute
        dtype = None if isinstance(input, Tensor) else self.dtype
        return product(input, self._operands(), self.bias, self._layout(), *options, dtype)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The layer's codes and scales, without a copy."""
        return QuantizedWeight(*self._layout(), *self._operands())

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A read-only view of the weight [N, K] in `dtype`; only its `data` is writable.

        An operation on it dequantizes the weight. Reading dtype, shape or device costs nothing.
        """
        if torch.compiler.is_compiling():  # the compiler removes an unused dequantization
            return dequantize_weight(self.quantized_weight, self.dtype)
        return DequantizedWeight(self)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        if isinstance(value, DequantizedWeight) and value._layer is self:
            self._take_codes(value._quantized.tensors())
        else:
            held = copy.deepcopy(self.quantized_weight)  # a view may be assigned back
            self._take_codes(held.tensors())
            self.forget()
            self._write(value)
        self.forget()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # else torch would register a Parameter next to the property
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Earlier versions kept codes alone, which are no longer enough to undo a write.
        self._before = [write for write in self._before if isinstance(write, Write)]

    def forget(self) -> None:
        """Frees the codes that `weight.data` had before writes. Unmerging is then inexact."""
        self._before.clear()

    def explain(self, rows: int) -> str:
        """Says which kernel runs for `rows` rows of input in `dtype`, and why.

        Raises TypeError if rows is not an int, and ValueError if it is negative.
        """
        if not isinstance(rows, int):
            got = type(rows).__name__
            raise TypeError(f"QuantizedLinear.explain: rows must be an int, got {got}")
        if rows < 0:
            raise ValueError(f"QuantizedLinear.explain: rows must be 0 or more, got {rows}")
        format, n, k, _ = self._layout()
        dtype, device = self.dtype, self.qweight.device.type
        asked = forced() if device in ("cpu", "cuda") else None
        what = f"{rows} rows of {_short(dtype)} by {format} [{n}, {k}] on {device}"
        if asked:
            what += f", where backend {asked!r} is forced"
            if not takes(asked, device):
                return f"{what}: an error, because that backend takes no {device} tensors"
        if dtype != torch.float64 and (plan := self._plan(asked or device, rows)):
            return f"{what}: {plan}"
        wide = torch.promote_types(dtype, torch.float32)
        plain = dtype if self.compute is None and self.input_format is None else wide
        operands = torch.bfloat16 if self.compute == "bf16" and wide == torch.float32 else plain
        return (
            f"{what}: ATen calls, because no kernel takes these options. Each call dequantizes the "
            f"weight to {_short(wide)} ({n * k * wide.itemsize >> 20} MiB), and torch multiplies "
            f"in {_short(operands)}"
        )

    def _plan(self, runner: str, rows: int) -> str:
        """Describes a device's or backend's kernel; empty if it has none."""
        options = self.input_format or "none", self.compute or "any"
        if runner == "cpu":
            return _C.quantized_linear_plan(*self._layout(), rows, *options)
        if runner not in ("cuda", "triton", "simt"):
            return ""
        narrow = self.dtype in (torch.float16, torch.bfloat16)
        few = -1  # the most rows that CUDA C++ multiplies
        if runner != "triton" and not unavailable("quantized_linear", runner):
            few = _C.quantized_linear_few_rows(*self._layout(), *options, narrow)
        runs = rows <= few or (runner != "simt" and not unavailable("quantized_linear", "triton"))
        return _C.quantized_linear_gpu_plan(*self._layout(), rows, *options, few) if runs else ""

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, format={self.format!r}, group_size={self.group_size}"
        options = ("scale", "activation", "input_format", "compute")
        values = ((name, getattr(self, name)) for name in options[self.format not in SHARES :])
        text += ", transposed=True" if self.transposed else ""
        return text + "".join(f", {name}={value!r}" for name, value in values if value is not None)

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        scales = scales_name(self.format)
        if self.holds_parameters:
            return self._codes("qweight"), self._codes(scales), self._codes("zeros")
        held: dict[str, Any] = self._buffers
        return held["qweight"], held[scales], held.get("zeros")

    def _code_rows(self) -> int:
        return self.out_features

    def _layout(self) -> tuple[str, int, int, int]:
        return self.format, self.out_features, self.in_features, self.group_size

    def _quantized(self, weight: Tensor) -> QuantizedWeight:
        size = self.group_size
        return quantize_weight(weight, self.format, group_size=size, scale=self.scale)

    def codes_of(self, weight: Tensor) -> QuantizedWeight:
        """The codes that this layer would have for a checkpoint's float weight."""
        return self._quantized(weight.t() if self.transposed else weight)

    def _numbers(self) -> Tensor:
        """The dequantized weight in float32 or float64, before rounding to `dtype`."""
        acc = torch.promote_types(self.dtype, torch.float32)
        return dequantize_weight(self.quantized_weight, acc)

    @torch.no_grad()
    def _write(self, target: Tensor, in_place: bool = False, added: bool = False) -> None:
        """Writes another weight: quantizes it, or restores old codes if it undoes a write.

        in_place: the target was computed from the weight before its rounding to `dtype`. added: by
        adding a tensor.
        """
        if target.shape != self.weight.shape:
            expected, got = list(self.weight.shape), list(target.shape)
            raise ValueError(f"QuantizedLinear: weight must be {expected}, got {got}")
        before = self._numbers()
        seen = before.dtype if in_place else self.dtype
        target = target.to(before.device)
        index = undone(self._before, before.to(seen), target, self.dtype, added)
        if index is not None:
            self._take_codes(self._before[index].before.tensors(), copy=True)
            del self._before[index:]
            return
        held, codes = copy.deepcopy(self.quantized_weight), self._quantized(target)
        self._take_codes(codes.tensors(), copy=True)
        now = self._numbers()
        write = Write.of(held, before.to(seen), target, now.to(seen), self.dtype)
        self._before = [*self._before[1 - MOST_BEFORE :], write]
        off = (now - target).norm()
        log.warning(
            "%s: re-quantized the assigned weight to %s; relative error %.2g, "
            "or %.2g relative to the change",
            self.path or repr(self),
            self.format,
            off / target.norm(),
            off / (target - before).norm(),
        )

    @torch.no_grad()
    def _add(self, change: Tensor, alpha: float) -> None:
        """Adds alpha * change; restores the old codes if that undoes the last write."""
        change = change.to(self.dtype)
        if self._before and self._gives_these_codes(self._before[-1].before, -alpha * change):
            self._take_codes(self._before.pop().before.tensors(), copy=True)
        else:
            self._write(self._numbers() + alpha * change, in_place=True, added=True)

    def _gives_these_codes(self, before: QuantizedWeight, change: Tensor) -> bool:
        """Whether quantizing before + change gives the current codes.

        Tries the sum both rounded to dtype and not: peft's merge adds to the weight, its safe_merge
        to a copy of it.
        """
        now = self.quantized_weight.tensors()
        for dtype in {self.dtype, torch.promote_types(self.dtype, torch.float32)}:
            merged = dequantize_weight(before.to(change.device), dtype) + change
            then = self._quantized(merged).tensors()
            if all(torch.equal(bytes_of(t), bytes_of(then[name])) for name, t in now.items()):
                return True
        return False

    def _apply(self, fn, recurse=True):
        example = torch.empty(1, dtype=self.dtype, device=self.qweight.device)
        super()._apply(fn, recurse)
        self.dtype = fn(example).dtype
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        held = {name: self._held(name) for name in self._code_names()}
        assign = local_metadata.get("assign_to_params_buffers", False)
        if problem := self._take_weight(state_dict, f"{prefix}weight", assign):
            error_msgs.append(f"QuantizedLinear: {prefix}weight {problem}")
        self._fit_codes(state_dict, prefix)
        codes = state_dict.get(f"{prefix}qweight", held["qweight"])
        if take_zeros(state_dict, prefix):
            error_msgs.append(
                f"QuantizedLinear: {prefix}qweight must be {LOADS}, got a GPTQ or AWQ checkpoint's"
            )
            problem = "has another format"
        elif reason := self._why_not(codes):
            error_msgs.append(f"QuantizedLinear: {prefix}qweight {reason}")
            problem = "has another format"
        if problem:
            state_dict.update({f"{prefix}{name}": t for name, t in held.items()})
        place = prefix or (self.path and f"{self.path}.")
        name = scales_name(self.format)
        warn_of_scales(f"{place}{name}", state_dict.get(f"{prefix}{name}"))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.forget()
        if self.bias is not None:  # with assign=True it may be a new tensor
            self.dtype = self.bias.dtype

    def _take_weight(self, state_dict: dict[str, Any], name: str, assign: bool) -> str:
        """Replaces float or bitsandbytes weights in a state dict with our codes.

        Returns what is wrong with the weight, or an empty string.
        """
        prefix, weight = name.removesuffix("weight"), state_dict.get(name)
        if weight is not None and weight.is_floating_point():
            del state_dict[name]
            if problem := self._misfit(weight.shape, self.transposed):
                return problem
            if assign:
                self.dtype = weight.dtype
            else:
                weight = weight.to(self.qweight.device)
            tensors = self.codes_of(weight).tensors()
            state_dict.update({f"{prefix}{part}": t for part, t in tensors.items()})
        elif self.format == "nf4" and (shape := take_bitsandbytes(state_dict, name)):
            return self._misfit(shape)
        elif weight is not None:
            for part in [key for key in state_dict if key.startswith(name)]:
                del state_dict[part]
            return f"must be {LOADS}, got other {_short(weight.dtype)} {list(weight.shape)}"
        return ""

    def _misfit(self, shape: Sequence[int], transposed: bool = False) -> str:
        sides, got = [self.out_features, self.in_features], list(shape)
        sides = sides[::-1] if transposed else sides
        return "" if got == sides else f"must be {sides}, got {got}"


MOST_BEFORE = 8  # how many merged adapters can be undone


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
