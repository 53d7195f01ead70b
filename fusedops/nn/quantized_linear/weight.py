"""The tensor `QuantizedLinear.weight`: dequantizes when used, quantizes writes to its `data`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusedops.functional.quantized_linear import QuantizedWeight, dequantize_weight

READ_ONLY = (
    "QuantizedLinear: weight is a read-only view of quantized codes; load_state_dict and writes to "
    "weight.data quantize a float weight"
)


class DequantizedWeight(Tensor):
    """A view of a quantized weight. Each operation on it dequantizes the weight first.

    Only its `data` can be written to, as a whole or by index; that re-quantizes the weight. Slices
    and copies of the view are independent dequantized tensors.
    """

    _layer: Any  # a QuantizedLinear, whose file imports this one
    _codes: QuantizedWeight | None  # None: the layer's of now, which may have to be gathered
    _written: bool  # whether this is `data`

    @staticmethod
    def __new__(cls, layer: Any, written: bool = False) -> "DequantizedWeight":
        shape = layer.out_features, layer.in_features
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        view = make(cls, shape, dtype=layer.dtype, device=layer.qweight.device)
        view._codes = None
        if not layer.holds_parameters:
            view._codes = layer.quantized_weight
            # Keep marks on the codes: transformers marks loaded tensors, to leave them as they are.
            view.__dict__.update(layer.qweight.__dict__)
        view._layer, view._written = layer, written
        return view

    @property
    def _quantized(self) -> QuantizedWeight:
        return self._codes or self._layer.quantized_weight

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
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        changed = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        views = [arguments[name] for name in changed if isinstance(arguments.get(name), cls)]
        if views:
            return views[0]._changed(func, args, kwargs)
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._layer)
        args, kwargs = tree_map_only(cls, _numbers, (args, kwargs))
        return func(*args, **kwargs)

    def _changed(self, func, args, kwargs) -> "DequantizedWeight":
        """Applies an in-place operation to the dequantized weight, in float32 for a sum."""
        if args[0] is not self:
            raise RuntimeError(READ_ONLY)
        self._check_written()
        others, kwargs = tree_map_only(DequantizedWeight, _numbers, (args[1:], kwargs))
        sign = {torch.ops.aten.add_.Tensor: 1, torch.ops.aten.sub_.Tensor: -1}.get(func)
        if sign and not kwargs and isinstance(others[0], Tensor) and others[0].shape == self.shape:
            self._layer._add(others[0], sign)
        elif func is torch.ops.aten.copy_.default:
            self._layer._write(others[0].expand(self.shape))
        else:
            numbers = self._layer._numbers()
            func(numbers, *others, **kwargs)
            self._layer._write(numbers, in_place=True)
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check_written()
        numbers = self._layer._numbers()
        numbers[index] = value
        self._layer._write(numbers, in_place=True)

    def _check_written(self) -> None:
        if not self._written:
            raise RuntimeError(READ_ONLY)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _numbers(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _numbers(self).__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return _numbers(self).numpy(force=force)

    def tolist(self) -> Any:
        return _numbers(self).tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DequantizedWeight({self._quantized.format}, {_numbers(self)})"


def _numbers(view: DequantizedWeight) -> Tensor:
    return dequantize_weight(view._quantized, view.dtype)
