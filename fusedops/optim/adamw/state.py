"""The state of one parameter: made, and brought from one format to another.

`step` float32 []; `exp_avg` and `exp_avg_sq` of the parameter's shape, in float32, bfloat16, or as
int8 and uint8 codes with `exp_avg_scale` and `exp_avg_sq_scale` float32 [blocks of 256 elements];
`max_exp_avg_sq` float32 with amsgrad; `remainder` int16, the lower half of a float32 parameter
whose upper half is the bfloat16 one.
"""

from typing import Any

import torch
from torch import Tensor

from fusedops.functional.adamw import BLOCK, REMAINDER, adamw_key, decoded, encoded, rounding_of

State = dict[str, Any]
Group = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
CODES = {torch.int8: torch.uint8}  # exp_avg's dtype to exp_avg_sq's, where they differ
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
STEP = "step"


def moments_dtype(p: Tensor, group: Group) -> torch.dtype:
    """What the moments are kept in: small tensors have no 8-bit ones."""
    small = group["state_dtype"] == "int8" and p.numel() < group["min_8bit_size"]
    return torch.float32 if small else DTYPES[group["state_dtype"]]


def empty_state(p: Tensor, group: Group) -> State:
    """The state before the first step."""
    dtype = moments_dtype(p, group)
    layout = torch.contiguous_format if dtype == torch.int8 else torch.preserve_format

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(p, dtype=dtype, memory_format=layout, requires_grad=False)

    state: State = {
        STEP: torch.zeros((), device=p.device),
        "exp_avg": zeros(dtype),
        "exp_avg_sq": zeros(CODES.get(dtype, dtype)),
    }
    if dtype == torch.int8:
        blocks = -(-p.numel() // BLOCK)
        state |= {name: torch.zeros(blocks, device=p.device) for name in SCALES}
    complete(state, p, group)
    return state


def complete(state: State, p: Tensor, group: Group) -> None:
    """Adds what the group's options ask for now and did not before."""
    if group["amsgrad"] and "max_exp_avg_sq" not in state:
        state["max_exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32, requires_grad=False)
    if rounding_of(p, group) == REMAINDER and "remainder" not in state:
        state["remainder"] = torch.zeros_like(p, dtype=torch.int16, requires_grad=False)


def formatted(state: State, p: Tensor, group: Group, index: int) -> State:
    """A state of any format, of ours or torch's, in the one that the group asks for.

    What has the format already keeps its bits. Else the moments are decoded and encoded again.
    """
    state = {k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in _renamed(state).items()}
    if STEP not in state:
        return state
    step = state[STEP]
    state[STEP] = torch.as_tensor(step, dtype=torch.float32, device=p.device).reshape(())
    wanted = empty_state(p, group)
    for name in ("max_exp_avg_sq", "remainder"):
        if name in wanted and name in state:
            wanted[name] = state[name].to(wanted[name].dtype)
    names = [k for k in wanted if k not in (STEP, "max_exp_avg_sq", "remainder")]
    if all(_alike(state.get(name), wanted[name]) for name in names):
        moments = {name: state[name] for name in names}
    else:
        key = adamw_key(group["seed"], int(state[STEP]), index)
        moments = _encoded(*wide_moments(state), wanted, key)
    return wanted | moments | {STEP: state[STEP]}


def wide_moments(state: State) -> tuple[Tensor, Tensor]:
    """exp_avg and exp_avg_sq in float32."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if m.dtype == torch.int8:
        return decoded(m, v, *(state[name] for name in SCALES))
    return m.float(), v.float()


def _encoded(m: Tensor, v: Tensor, wanted: State, key: int) -> State:
    if wanted["exp_avg"].dtype == torch.int8:
        names = ("exp_avg", "exp_avg_sq", *SCALES)
        return dict(zip(names, encoded(m, v, key), strict=True))
    return {
        name: torch.empty_like(wanted[name]).copy_(value)
        for name, value in (("exp_avg", m), ("exp_avg_sq", v))
    }


def _alike(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)


def _renamed(state: State) -> State:
    """bitsandbytes' 8-bit and torchao's states as ours, or as float32 moments."""
    if "state1" in state:
        return _of_bitsandbytes(state)
    return {
        k: v.dequantize() if hasattr(v, "codes") and hasattr(v, "scale") else v
        for k, v in state.items()
    }


def _of_bitsandbytes(state: State) -> State:
    found = {STEP: state["step"]}
    for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        moments = state[f"state{i}"]
        if moments.dtype == torch.uint8:
            values = state[f"qmap{i}"].float()[moments.reshape(-1).long()]
            absmax = state[f"absmax{i}"].float()
            block = -(-moments.numel() // absmax.numel())
            block = 1 << (block - 1).bit_length()  # its blocks are powers of two
            scales = absmax.repeat_interleave(block)[: moments.numel()]
            moments = (values * scales).view(moments.shape)
        found[name] = moments
    return found
