"""Codes: a module that holds a quantized weight's tensors, as buffers or as frozen parameters."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedops.functional.quantized_linear import scales_name

__all__ = ["Codes", "bytes_of", "codes_as_buffers", "codes_as_parameters"]


class Form(NamedTuple):
    """What a tensor of a quantized weight is, beside its bytes."""

    dtype: torch.dtype
    shape: torch.Size

    def of(self, held: Tensor) -> Tensor:
        return held.reshape(-1).view(self.dtype).view(self.shape)


class Codes(nn.Module):
    """Base of modules whose buffers are a quantized weight's tensors.

    Parameters are of bytes, [rows of the weight, bytes per row], so that no float cast and no mixed
    precision changes them, and so that a cut between rows is one between blocks.
    """

    format: str
    _forms: dict[str, Form] | None = None  # of the tensors, while they are parameters

    @property
    def holds_parameters(self) -> bool:
        """Whether the tensors are parameters; see `codes_as_parameters`."""
        return self._forms is not None

    def _code_names(self) -> list[str]:
        names = "qweight", scales_name(self.format), "zeros"
        held = self._forms or self._buffers
        return [name for name in names if name in held]

    def _held(self, name: str) -> Any:
        """A tensor as the module holds it, perhaps a shard."""
        return (self._parameters if self._forms else self._buffers)[name]

    def _codes(self, name: str) -> Any:
        """One of the weight's tensors, or None. Gathers a sharded one."""
        if not self._forms:
            return self._buffers.get(name)
        if name not in self._forms:
            return None
        held = self._held(name)
        whole = held.full_tensor() if hasattr(held, "full_tensor") else held
        return self._forms[name].of(whole)

    def _code_rows(self) -> int:
        """How many rows the weight has."""
        raise NotImplementedError

    def _take_codes(self, tensors: dict[str, Tensor], copy: bool = False) -> None:
        """Replaces the tensors, or writes into the present ones if copy is true."""
        for name, tensor in tensors.items():
            held = self._held(name)
            if hasattr(held, "full_tensor"):
                raise RuntimeError(
                    f"{type(self).__name__}: {name} must be whole to be written, got a shard; "
                    "write to the weight before fully_shard"
                )
            if copy:
                self._codes(name).copy_(tensor)
            elif self._forms:
                held.data = bytes_of(tensor).view(held.shape)
            else:
                setattr(self, name, tensor)

    def _fit_codes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Brings a state dict's tensors into the module's form: bytes if it holds parameters."""
        name = scales_name(self.format)
        scales = state_dict.get(f"{prefix}{name}")
        if type(scales) is not Tensor or (scales.dtype == torch.uint8) == self.holds_parameters:
            return
        for name in self._code_names():
            own, given = self._held(name), state_dict.get(f"{prefix}{name}")
            if type(given) is Tensor and given.nbytes == own.nbytes:
                state_dict[f"{prefix}{name}"] = bytes_of(given).view(own.dtype).view(own.shape)

    def _apply(self, fn, recurse=True):
        """Like torch's, but passes codes and scales as bytes, which float casts leave alone."""
        if self._forms:
            return super()._apply(fn, recurse)
        held: dict[str, Any] = self._buffers
        own = {name: held[name] for name in self._code_names()}
        as_bytes = {name: bytes_of(t) for name, t in own.items()}
        held.update(as_bytes)
        try:
            super()._apply(fn, recurse)
        finally:
            for name, t in own.items():
                if held[name].dtype != torch.uint8:  # Module.type casts integers too
                    held[name] = as_bytes[name].to(held[name].device)
                held[name] = held[name].view(t.dtype).view(t.shape)
        return self

    def _into_parameters(self) -> None:
        if self._forms:
            return
        held = {name: self._held(name) for name in self._code_names()}
        rows = self._code_rows()
        for name, t in held.items():
            flat = bytes_of(t)
            width = flat.numel() // rows if rows and flat.numel() % rows == 0 else t.itemsize
            del self._buffers[name]
            self.register_parameter(name, nn.Parameter(flat.view(-1, width or 1), False))
        self._forms = {name: Form(t.dtype, t.shape) for name, t in held.items()}

    def _into_buffers(self) -> None:
        if self._forms:
            held = {name: self._codes(name) for name in self._forms}
            self._forms = None
            for name, t in held.items():
                del self._parameters[name]
                self.register_buffer(name, t.detach())


def codes_as_parameters(model: nn.Module) -> nn.Module:
    """Makes the codes and scales of a model's quantized weights frozen parameters.

    FSDP2's `fully_shard` shards parameters, and leaves a copy of the buffers on every rank; DDP
    sends buffers to all ranks in each forward. Call this before either. The parameters are bytes,
    uint8 [out_features, bytes per row] (experts: [experts * out_features, bytes per row]), with
    requires_grad=False: rows are cut between quantization blocks, and no mixed precision casts
    them. Where a row of nf4 is no multiple of 64 elements, its blocks span rows, and the cut is
    between bytes, which changes nothing that is computed. A state dict of either form loads into
    either. The model shares the memory it had. Returns the model.

    While sharded, reading a layer's `weight` gathers it, on all ranks together, and writing to it
    raises RuntimeError. Raises TypeError if model is no module.
    """
    for module in _holders("codes_as_parameters", model):
        module._into_parameters()
    return model


def codes_as_buffers(model: nn.Module) -> nn.Module:
    """Undoes `codes_as_parameters`. Gathers what is sharded. Returns the model.

    Raises TypeError if model is no module.
    """
    for module in _holders("codes_as_buffers", model):
        module._into_buffers()
    return model


def _holders(caller: str, model: nn.Module) -> list[Codes]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
    return [module for module in model.modules() if isinstance(module, Codes)]


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
