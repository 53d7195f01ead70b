"""Decides whether `attention` takes a call of attention, and whether it is faster than torch's."""

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from fusedops.functional.attention import DEVICES
from fusedops.patching.core.calls import BY_SIZE, UNMEASURED
from fusedops.patching.core.thresholds import attention_pays, attention_unmeasured

__all__ = ["autocast_dtype", "why_slow", "why_unfit"]


def autocast_dtype(query: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of products; it leaves float64 as it is."""
    device = query.device.type
    if query.dtype == torch.float64 or not is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def why_unfit(query: Tensor, key: Tensor, value: Tensor, **masks: object) -> str:
    """Why `attention` cannot take the call; empty if it can. masks: by the model's names."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "query, key and value are not all 4-D"
    q_shape, k_shape, v_shape, device = query.shape, key.shape, value.shape, query.device.type
    if device not in DEVICES:
        return f"there is no kernel for {device}"
    if not q_shape[0] == k_shape[0] == v_shape[0]:
        return "the batch sizes differ"
    if not query.dtype == key.dtype == value.dtype and not torch.is_autocast_enabled(device):
        return "the dtypes differ"
    if k_shape[1] != v_shape[1] or q_shape[1] % k_shape[1]:
        return "the numbers of heads are incompatible"
    for name, added in masks.items():
        if added is None:
            continue
        dtypes = torch.bool, torch.float32, query.dtype
        if not isinstance(added, Tensor) or added.dtype not in dtypes:
            return f"{name} is neither bool, float32 nor query's dtype"
        whole = *q_shape[:3], k_shape[2]
        if added.dim() != 4 or any(
            n not in (1, size) for n, size in zip(added.shape, whole, strict=True)
        ):
            return f"{name} does not broadcast to the scores"
    return ""


def why_slow(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout_p: float,
) -> str:
    """Why to leave a call without softcap, sinks and bias to torch; empty if not."""
    if query.device.type == "cuda":
        return UNMEASURED if attention_unmeasured(query, value, True) else ""
    return "" if attention_pays(query, key, mask, causal, dropout_p) else BY_SIZE
