"""Converts bitsandbytes' and torchao's AdamW states to torch's names and floating-point moments."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fusedops.optim.adamw.check import MISSING, Misfit, check_entry, check_numbers
from fusedops.optim.adamw.shard import is_dtensor, local

__all__ = ["decoded_peers", "flat"]

State = dict[str, Any]

HIDDEN = "__bnb_optimizer_quant_state__"  # where bitsandbytes hides its tensors from FSDP
NAMES = {"state1": "exp_avg", "state2": "exp_avg_sq"}  # bitsandbytes' name -> torch's
MAP = 256  # entries in bitsandbytes' code map


def flat(state: Mapping[str, Any]) -> State:
    """Moves the entries of bitsandbytes' nested dict into the state."""
    hidden = state.get(HIDDEN, {})
    if not isinstance(hidden, Mapping):
        raise Misfit(HIDDEN, "a dict", hidden)
    return {name: value for name, value in state.items() if name != HIDDEN} | dict(hidden)


def decoded_peers(state: State, p: Tensor) -> State:
    """Renames entries to torch's names and dequantizes bitsandbytes' and torchao's codes.

    Both moments become zeros in blocks whose scale is not finite. Raises Misfit.
    """
    if "state1" in state:
        converted = {NAMES[name]: _from_bitsandbytes(state, name, p) for name in NAMES}
        converted |= {"step": state["step"]} if "step" in state else {}
    else:
        converted = {name: _dequantized(value) for name, value in state.items()}
    loaded = [id(value) for value in state.values()]
    decoded = [t for name, t in converted.items() if name in NAMES.values() and id(t) not in loaded]
    if len(decoded) == 2:
        _zero_unless_finite(*map(local, decoded))
    return converted


def _zero_unless_finite(m: Tensor, v: Tensor) -> None:
    """Writes zeros in place where either of two decoded moments is not finite."""
    if m.shape == v.shape:
        finite = m.isfinite() & v.isfinite()
        for t in (m, v):
            t.masked_fill_(~finite, 0)


def _dequantized(value: Any) -> Any:
    """Dequantizes torchao's codes to float32; for a DTensor, each rank dequantizes its part."""
    if is_dtensor(value) and hasattr(value.to_local(), "codes"):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            _dequantized(value.to_local()),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value.dequantize() if hasattr(value, "codes") and hasattr(value, "scale") else value


def _from_bitsandbytes(state: State, name: str, p: Tensor) -> Tensor:
    """Dequantizes state1 or state2 with its map and block maxima; returns floats unchanged."""
    number = name.removeprefix("state")
    codes, absmax, numbers = (
        state.get(f"{part}{number}", MISSING) for part in ("state", "absmax", "qmap")
    )
    check_entry(name, codes, p, "floating-point", "uint8")
    if codes.is_floating_point():
        return codes
    check_numbers(f"qmap{number}", numbers, p, MAP, "floating-point")
    count = codes.numel()
    block = _block(count, absmax.numel() if isinstance(absmax, Tensor) else 0)
    check_numbers(f"absmax{number}", absmax, p, -(-count // block), "floating-point")
    values = numbers.float()[codes.reshape(-1).long()]
    scales = absmax.float().reshape(-1).repeat_interleave(block)[:count]
    return (values * scales).view(codes.shape)


def _block(count: int, blocks: int) -> int:
    """bitsandbytes' block size in elements, a power of two."""
    return 1 << (-(-count // max(blocks, 1)) - 1).bit_length()
