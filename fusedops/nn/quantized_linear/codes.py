"""Codes: a module that holds a quantized weight's tensors, as buffers or as frozen parameters."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedops.functional.quantized_linear import scales_name
from fusedops.functional.quantized_rows import as_bytes, as_codes

__all__ = ["Codes", "bytes_of", "codes_as_buffers", "codes_as_parameters"]


class Form(NamedTuple):
    """What a tensor of a quantized weight is, beside its bytes."""

    dtype: torch.dtype
    shape: torch.Size

    def of(self, held: Tensor) -> Tensor:
        flat = held.reshape(-1)
        if not torch.compiler.is_compiling() and flat.storage_offset() % self.dtype.itemsize:
            flat = flat.clone()  # part of an engine's flat buffer
        return flat.view(self.dtype).view(self.shape)


class CodesParameter(nn.Parameter):
    """Frozen parameter of bytes, for which torch cannot compute gradients."""

    def requires_grad_(self, requires_grad: bool = True):
        """Changes nothing, so that it may be called for all parameters of a model."""
        return self


def _skip(requires_grad: bool = True) -> None:
    """`requires_grad_` of a sharded parameter of bytes."""


class Codes(nn.Module):
    """Base of modules whose buffers are a quantized weight's tensors.

    The parameters hold bytes, [rows of the weight, bytes per row], so that no float cast and no
    mixed precision changes them, and so that a cut between rows is one between blocks.
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
            if self._forms:
                tensor = self._as_bytes(tensor)
            if copy:
                held.copy_(tensor)
            elif self._forms:
                held.data = tensor
            else:
                setattr(self, name, tensor)

    def _as_bytes(self, tensor: Tensor) -> Tensor:
        """One of the weight's tensors as a parameter holds it: [rows of the weight, bytes per row].

        fp8 codes have a third dimension, of 1: int8 codes would have the same shape, and
        torch.distributed.checkpoint compares shapes but converts dtypes.
        """
        flat, rows = bytes_of(tensor), self._code_rows()
        width = flat.numel() // rows if rows and flat.numel() % rows == 0 else tensor.itemsize
        return flat.view(-1, width or 1, *([1] if tensor.dtype == torch.float8_e4m3fn else []))

    def _fit_codes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Brings a state dict's tensors into the module's form: bytes if it holds parameters."""
        for name in self._code_names():
            held, key = self._held(name), f"{prefix}{name}"
            loaded: Any = state_dict.get(key)
            if type(loaded) not in (Tensor, nn.Parameter, CodesParameter):
                continue
            if self._forms:
                if (loaded.dtype, loaded.shape) == self._forms[name]:
                    state_dict[key] = self._as_bytes(loaded)
            elif loaded.dtype == torch.uint8 and loaded.shape == self._as_bytes(held).shape:
                state_dict[key] = Form(held.dtype, held.shape).of(loaded)

    def _why_not(self, qweight: Tensor) -> str:
        """Why a state dict's qweight, fitted, has another format's codes; empty if it may load."""
        held = self._held("qweight")
        if qweight.dtype != held.dtype:
            expected, got = (str(t.dtype).removeprefix("torch.") for t in (held, qweight))
            return f"must be {expected}, got {got}"
        if qweight.dim() != held.dim():
            shapes = f"{list(held.shape)}, got {list(qweight.shape)}"
            return f"must be {self.format} codes of shape {shapes}"
        return ""

    def _apply(self, fn, recurse=True):
        """Like torch's, but passes codes and scales as bytes, and keeps bytes that fn casts."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            if t.dtype == torch.uint8 and moved.dtype != t.dtype:  # Module.type casts integers too
                return t.to(moved.device)
            return moved

        if self._forms:
            super()._apply(move, recurse)
            self._freeze()  # torch replaces parameters of the meta device
            return self
        held: dict[str, Any] = self._buffers
        codes = {name: held[name] for name in self._code_names()}
        held.update((name, bytes_of(t)) for name, t in codes.items())
        try:
            super()._apply(move, recurse)
        finally:
            for name, t in codes.items():
                held[name] = held[name].view(t.dtype).view(t.shape)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in (self._forms or ()):  # FSDP2's shards, load_state_dict(assign=True)
            self._freeze()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffers": as_bytes(self._buffers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_buffers": as_codes(state["_buffers"])})
        self._freeze()  # pickle makes plain parameters

    def _freeze(self) -> None:
        """Makes `requires_grad_`, also that of a module around this one, skip the parameters."""
        for name in self._forms or ():
            held: Any = self._parameters[name]
            if type(held) is nn.Parameter:
                held.__class__ = CodesParameter
            elif hasattr(held, "full_tensor"):
                held.requires_grad_ = _skip  # many functions take no subclass of DTensor

    def _into_parameters(self) -> None:
        if self._forms:
            return
        held = {name: self._held(name) for name in self._code_names()}
        for name, t in held.items():
            del self._buffers[name]
            self.register_parameter(name, CodesParameter(self._as_bytes(t), False))
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
    uint8 [out_features, bytes per row] (experts: [experts * out_features, bytes per row]; fp8 codes
    have a third dimension, of 1), with requires_grad=False: rows are cut between quantization
    blocks, and no mixed precision casts them. Where nf4 rows are not whole blocks of 64 elements, a
    rank may hold part of a block; results do not change. Whoever counts parameters counts bytes.
    The model shares the memory it had. Returns the model.

    load_state_dict takes a state dict of either form before `fully_shard`. It does not convert
    forms afterwards, and torch.distributed.checkpoint never does. To train, load buffers, then call
    this, then `fully_shard`. To serve a sharded checkpoint, call this, dcp.load, then
    `codes_as_buffers`.

    While sharded, reading a layer's `weight` gathers it, on all ranks together, and writing to it
    raises RuntimeError. `requires_grad_` of the model or any of its modules skips the bytes;
    assigning True to a parameter's `requires_grad` raises, as torch does for bytes.

    Raises TypeError if model is no module.
    """
    for module in _holders("codes_as_parameters", model):
        module._into_parameters()
    return model


def codes_as_buffers(model: nn.Module) -> nn.Module:
    """Undoes `codes_as_parameters`. Returns the model.

    Raises RuntimeError if `fully_shard` took the model, which then must keep its parameters, and
    TypeError if model is no module.
    """
    modules = [m for m in _holders("codes_as_buffers", model) if m.holds_parameters]
    if modules and (_wrapped(model) or any(map(_has_shards, modules))):
        raise RuntimeError(
            "codes_as_buffers: model must hold whole codes, got one that fully_shard took; call it "
            "before fully_shard. To export the model, take get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), which loads into buffers"
        )
    for module in modules:
        module._into_buffers()
    return model


def _holders(caller: str, model: nn.Module) -> list[Codes]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}")
    return [module for module in model.modules() if isinstance(module, Codes)]


def _wrapped(model: nn.Module) -> bool:
    """Whether FSDP2 manages a module of the model; its parameters may be gathered for now."""
    managed = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(module, managed) for module in model.modules())


def _has_shards(module: Codes) -> bool:
    return any(hasattr(module._held(name), "full_tensor") for name in module._code_names())


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
