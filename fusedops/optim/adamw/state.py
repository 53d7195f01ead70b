"""The state of one parameter: made, and brought from one format to another.

`step` float32 []; `exp_avg` and `exp_avg_sq` of the parameter's shape, in float32, bfloat16, or as
int8 and uint8 codes with `exp_avg_scale` and `exp_avg_sq_scale`, float32, one for 256 elements;
`max_exp_avg_sq` float32 with amsgrad; `remainder` int16, the lower half of a float32 parameter
whose upper half is the bfloat16 one. Of a DTensor they are DTensors, but for the step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from fusedops.functional.adamw import (
    FLOATS,
    REMAINDER,
    adamw_key,
    decoded,
    encoded,
    rounding_of,
)
from fusedops.optim.adamw.shard import distributed, local, rows_of, scales_shape, takes_codes

State = dict[str, Any]
Group = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
CODES = {torch.int8: torch.uint8}  # exp_avg's dtype to exp_avg_sq's, where they differ
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
STEP, MAXIMUM, REST = "step", "max_exp_avg_sq", "remainder"
HIDDEN = "__bnb_optimizer_quant_state__"  # bitsandbytes'


def moments_dtype(p: Tensor, group: Group) -> torch.dtype:
    """What the moments are kept in: small tensors have no 8-bit ones."""
    wanted = group["state_dtype"]
    if wanted == "int8" and (p.numel() < group["min_8bit_size"] or not takes_codes(p)):
        return torch.float32
    return DTYPES[wanted]


def empty_state(p: Tensor, group: Group) -> State:
    """The state before the first step."""
    dtype = moments_dtype(p, group)
    layout = torch.contiguous_format if dtype == torch.int8 else torch.preserve_format
    state: State = {
        STEP: torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": _zeros(p, dtype, layout),
        "exp_avg_sq": _zeros(p, CODES.get(dtype, dtype), layout),
    }
    if dtype == torch.int8:
        shape = scales_shape(p)
        part = local(p)
        count = part.shape[0] * shape[1] if len(shape) > 1 else shape[0]
        for name in SCALES:
            scales = torch.zeros(count, dtype=torch.float32, device=p.device)
            state[name] = distributed(p, scales, shape)
    complete(state, p, group)
    return state


def complete(state: State, p: Tensor, group: Group) -> None:
    """Adds what the group's options ask for now and did not before."""
    if group["amsgrad"] and MAXIMUM not in state:
        state[MAXIMUM] = _zeros(p, torch.float32)
    if rounding_of(p, group) == REMAINDER and REST not in state:
        state[REST] = _zeros(p, torch.int16)


def _zeros(p: Tensor, dtype: torch.dtype, layout=torch.preserve_format) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=layout, requires_grad=False)


def formatted(state: State, p: Tensor, group: Group, index: int) -> State:
    """A state of any format, of ours or torch's, in the one that the group asks for.

    What has the format already keeps its bits. Else the moments are decoded and encoded again.
    """
    if STEP not in state:
        return state
    if p.dtype not in FLOATS:  # torch's own step has its states in the parameter's dtype
        state = _renamed(state)
        as_torchs(state, p)
        return state
    step = torch.as_tensor(state[STEP], dtype=torch.float32, device=p.device).reshape(())
    found = {k: _placed(v, p) for k, v in _renamed(state).items() if k != STEP}
    wanted = empty_state(p, group)
    kept = {k: found[k].to(wanted[k].dtype) for k in (MAXIMUM, REST) if k in wanted and k in found}
    names = [*MOMENTS, *SCALES] if "exp_avg_scale" in wanted else [*MOMENTS]
    if all(_alike(found.get(name), wanted[name]) for name in names):
        moments = {name: found[name] for name in names}
    else:
        key = adamw_key(group["seed"], int(step), index)
        moments = _encoded(*wide_moments(found, p), p, wanted, key)
    own = {k: v for k, v in found.items() if k not in (*MOMENTS, *SCALES, MAXIMUM, REST)}
    return own | wanted | moments | kept | {STEP: step}


def as_torchs(state: State | None, p: Tensor) -> None:
    """Makes a state, if there is one, what torch's own step has: of the parameter's dtype."""
    if not state or STEP not in state:
        return
    if state["exp_avg"].dtype == torch.int8:
        wide = (distributed(p, t, tuple(p.shape)) for t in wide_moments(state, p))
        state.update(zip(MOMENTS, wide, strict=True))
        for name in SCALES:
            del state[name]
    for name in (*MOMENTS, MAXIMUM):
        if name in state and not (state[name].is_complex() and not p.is_complex()):
            state[name] = state[name].to(device=p.device, dtype=p.dtype)


def wide_moments(state: State, p: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's exp_avg and exp_avg_sq in float32."""
    m, v = (local(state[name]) for name in MOMENTS)
    if m.dtype == torch.int8:
        m_scale, v_scale = (local(state[name]) for name in SCALES)
        return decoded(m, v, m_scale, v_scale, rows_of(p)[0])
    return m.float(), v.float()


def _encoded(m: Tensor, v: Tensor, p: Tensor, wanted: State, key: int) -> State:
    codes = wanted["exp_avg"].dtype == torch.int8
    if codes:  # a scale is 256 elements': one that is not finite starts anew, and they go on
        finite = m.isfinite() & v.isfinite()
        m, v = (torch.where(finite, t, 0) for t in (m, v))
    values: tuple[Tensor, ...] = encoded(m, v, key, *rows_of(p)) if codes else (m, v)
    for name, value in zip((*MOMENTS, *SCALES), values, strict=False):
        into = local(wanted[name])
        into.copy_(value.reshape(into.shape))
    return {name: wanted[name] for name in (*MOMENTS, *SCALES) if name in wanted}


def _placed(value: Any, p: Tensor) -> Any:
    """A loaded tensor where the parameter is, and cut as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(p.device)
    if isinstance(p, DTensor) and not isinstance(value, DTensor) and value.shape == p.shape:
        return distribute_tensor(value, p.device_mesh, p.placements)
    return value


def _alike(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)


def flat(state: State) -> State:
    """A state without the dict in which bitsandbytes hides its tensors from FSDP."""
    rest = {name: value for name, value in state.items() if name != HIDDEN}
    return rest | state.get(HIDDEN, {})


def _renamed(state: State) -> State:
    """bitsandbytes' and torchao's states as ours, their moments in float32."""
    state = flat(state)
    if "state1" in state:
        return _of_bitsandbytes(state)
    return {name: _dequantized(value) for name, value in state.items()}


def _dequantized(value: Any) -> Any:
    """What torchao keeps as codes, in float32; on each rank its part of a DTensor."""
    if isinstance(value, DTensor) and hasattr(value.to_local(), "codes"):
        return DTensor.from_local(
            _dequantized(value.to_local()),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value.dequantize() if hasattr(value, "codes") and hasattr(value, "scale") else value


def _of_bitsandbytes(state: State) -> State:
    found = {STEP: state[STEP]}
    for i, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        moments = state[f"state{i}"]
        if f"absmax{i}" in state:
            values = state[f"qmap{i}"].float()[moments.reshape(-1).long()]
            absmax = state[f"absmax{i}"].float()
            block = -(-moments.numel() // absmax.numel())
            block = 1 << (block - 1).bit_length()  # its blocks are powers of two
            scales = absmax.repeat_interleave(block)[: moments.numel()]
            moments = (values * scales).view(moments.shape)
        found[name] = moments
    return found
