"""Creates and converts one parameter's AdamW state.

`step` float32 []; `exp_avg` and `exp_avg_sq` in the parameter's shape, as float32, bfloat16, or
int8 and uint8 codes with `exp_avg_scale` and `exp_avg_sq_scale` (float32, one per 256 elements);
`max_exp_avg_sq` float32 with amsgrad; `remainder` int16, the lower half of the bits of a float32
parameter that rounds to the bfloat16 one. In torch's format the moments and `max_exp_avg_sq` have
the parameter's dtype. For a DTensor, all but the step are DTensors.
"""

from typing import Any

import torch
from torch import Tensor

from fusedops.functional.adamw import FLOATS
from fusedops.optim.adamw.check import MISSING, check_entry, check_numbers, check_step
from fusedops.optim.adamw.memory import writable
from fusedops.optim.adamw.peers import decoded_peers, flat
from fusedops.optim.adamw.shard import (
    distributed,
    is_dtensor,
    local,
    rows_of,
    scales_count,
    scales_shape,
    takes_codes,
)
from fusedops.references.adamw import (
    NEAREST,
    REMAINDER,
    STOCHASTIC,
    blocks,
    decoded,
    encoded,
    unblocked,
)

State = dict[str, Any]
Group = dict[str, Any]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
CODES = {torch.int8: torch.uint8}  # exp_avg's dtype -> exp_avg_sq's, where they differ
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
STEP, MAXIMUM, REST = "step", "max_exp_avg_sq", "remainder"
WRITTEN = (STEP, *MOMENTS, *SCALES, MAXIMUM, REST)  # what a step writes in place


def moments_dtype(p: Tensor, group: Group) -> torch.dtype:
    """The moments' dtype: small tensors never have 8-bit ones."""
    state_dtype = group["state_dtype"]
    if state_dtype == "int8" and (p.numel() < group["min_8bit_size"] or not takes_codes(p)):
        return torch.float32
    return DTYPES[state_dtype]


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
        for name in SCALES:
            scales = torch.zeros(scales_count(p), dtype=torch.float32, device=p.device)
            state[name] = distributed(p, scales, scales_shape(p))
    complete(state, p, group)
    return state


def complete(state: State, p: Tensor, group: Group) -> None:
    """Adds missing entries that the group's options and p's dtype need, and drops a remainder.

    A remainder belongs to a bfloat16 parameter's bits: after another dtype it is out of date.
    """
    if group["amsgrad"] and MAXIMUM not in state:
        state[MAXIMUM] = _zeros(p, torch.float32)
    if rounding_of(p, group) != REMAINDER:
        state.pop(REST, None)
    elif REST not in state:
        state[REST] = _zeros(p, torch.int16)


def _zeros(p: Tensor, dtype: torch.dtype, layout=torch.preserve_format) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=layout, requires_grad=False)


def formatted(state: State, p: Tensor, group: Group) -> State:
    """Converts a state of any format, ours or torch's, to the group's format.

    A state already in that format keeps its bits. Otherwise the moments are decoded and encoded
    again. Blocks of codes with a NaN, infinite or negative scale restart from zeros, in both
    moments. `state` is not changed. Raises Misfit if an entry cannot be loaded.
    """
    state = decoded_peers(flat(state), p)
    check_step(state.get(STEP, MISSING), p)
    if isinstance(state[STEP], Tensor):
        state[STEP] = writable(state[STEP])
    if p.dtype not in FLOATS:
        return _torchs(state, p, group)
    target = empty_state(p, group)
    entries = {k: _placed(v, p, target.get(k, p)) for k, v in state.items() if k != STEP}
    entries |= _checked(entries, p, target)
    entries |= _without_bad_blocks(entries, p)
    step = torch.as_tensor(state[STEP], dtype=torch.float32, device=p.device).reshape(())
    kept = {
        k: entries[k].to(target[k].dtype) for k in (MAXIMUM, REST) if k in target and k in entries
    }
    names = [*MOMENTS, *SCALES] if "exp_avg_scale" in target else [*MOMENTS]
    if all(_same_format(entries.get(name), target[name]) for name in names):
        moments = {name: entries[name] for name in names}
    else:
        moments = _encoded(*wide_moments(entries, p), p, target)
    others = {k: v for k, v in entries.items() if k not in (*MOMENTS, *SCALES, MAXIMUM, REST)}
    return others | target | moments | kept | {STEP: step}


def _torchs(state: State, p: Tensor, group: Group) -> State:
    """`formatted` for torch's own step, whose moments have the parameter's dtype."""
    state |= _checked(state, p, {MAXIMUM: None} if group["amsgrad"] else {})
    state |= _without_bad_blocks(state, p)
    as_torchs(state, p)
    return state


def _checked(entries: State, p: Tensor, target: State) -> State:
    """The tensors that a step needs, writable. Raises Misfit if one is missing or wrong."""
    floats = "complex" if p.is_complex() else "floating-point"
    m, v = (entries.get(name, MISSING) for name in MOMENTS)
    check_entry("exp_avg", m, p, floats, "int8")
    codes = m.dtype == torch.int8
    check_entry("exp_avg_sq", v, p, "uint8" if codes else floats)
    names = [*MOMENTS, *SCALES] if codes else [*MOMENTS]
    for name in names[len(MOMENTS) :]:
        check_numbers(name, entries.get(name, MISSING), p, scales_count(p), "float32")
    for name, kind in ((MAXIMUM, floats), (REST, "int16")):
        if name in target and name in entries:
            check_entry(name, entries[name], p, kind)
            names.append(name)
    return {name: writable(entries[name], contiguous=name in SCALES) for name in names}


def _without_bad_blocks(entries: State, p: Tensor) -> State:
    """The 8-bit moments' entries, with zeros in blocks whose scale a step would never write.

    exp_avg_sq's moments are at most the fourth power of its scale. Empty if every scale is valid,
    or if the moments are not codes.
    """
    if entries["exp_avg"].dtype != torch.int8 or entries["exp_avg"].is_meta:
        return {}
    m, v = (local(entries[name]).reshape(-1) for name in SCALES)
    sound = (m >= 0) & (m < torch.inf) & (v >= 0) & (v**4 < torch.inf)
    if sound.all():
        return {}
    row, cleared = rows_of(p)[0], {}
    for name in (*MOMENTS, *SCALES):
        part = local(entries[name])
        by_block = blocks(part, row) if name in MOMENTS else part.reshape(-1, 1)
        kept = torch.where(sound[:, None], by_block, 0)
        kept = unblocked(kept, part, row) if name in MOMENTS else kept.view(part.shape)
        is_cut = is_dtensor(entries[name])
        cleared[name] = distributed(p, kept, tuple(entries[name].shape)) if is_cut else kept
    return cleared


def as_torchs(state: State | None, p: Tensor) -> None:
    """Converts a state, if any, to the format of torch's own step: the parameter's dtype."""
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


def _encoded(m: Tensor, v: Tensor, p: Tensor, target: State) -> State:
    codes = target["exp_avg"].dtype == torch.int8
    if codes:  # 256 elements share a scale: zero those that are not finite
        finite = m.isfinite() & v.isfinite()
        m, v = (torch.where(finite, t, 0) for t in (m, v))
    values: tuple[Tensor, ...] = encoded(m, v, row=rows_of(p)[0]) if codes else (m, v)
    for name, value in zip((*MOMENTS, *SCALES), values, strict=False):
        into = local(target[name])
        into.copy_(value.reshape(into.shape))
    return {name: target[name] for name in (*MOMENTS, *SCALES) if name in target}


def _placed(value: Any, p: Tensor, like: Any) -> Any:
    """A loaded tensor, moved to the parameter's device and sharded as `like` is."""
    if not isinstance(value, Tensor) or value.is_meta or value.is_nested:
        return value
    value = value.to(p.device)
    if is_dtensor(like) and not is_dtensor(value) and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, like.device_mesh, like.placements)
    return value


def _same_format(entry: Tensor | None, target: Tensor) -> bool:
    return entry is not None and (entry.dtype, entry.shape) == (target.dtype, target.shape)


def rounding_of(p: Tensor, group: Group) -> int:
    """How a parameter is rounded under its group's options."""
    if p.dtype == torch.float32:
        return NEAREST
    if group["master_weights"] == "remainder" and p.dtype == torch.bfloat16:
        return REMAINDER
    return NEAREST if group["stochastic_rounding"] is False else STOCHASTIC
