"""Registers fusedops' `attention` with transformers, and decides in each call whether it runs.

transformers keeps two tables by name: attention functions, and functions that build their masks. If
a name is missing in the second one, padding masks are silently lost.
"""

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn import functional as F

from fusedops.functional.attention import attention
from fusedops.patching.core.attention import autocast_dtype, why_unfit
from fusedops.patching.core.calls import BY_SIZE, UNMEASURED, Repeat, decides
from fusedops.patching.core.config import NAME, implementation
from fusedops.patching.core.masks import simplest
from fusedops.patching.core.source import Unreadable, innermost
from fusedops.patching.core.swap import original_class
from fusedops.patching.core.thresholds import (
    attention_pays,
    attention_unmeasured,
    inductor_fuses,
)

__all__ = ["attend", "attention_forward", "eager_function", "register_attention"]

F32 = torch.float32
SDPA = torch._C._nn.scaled_dot_product_attention
log = logging.getLogger("fusedops.patching")

# Arguments that models pass on but that do not affect the scores; sdpa ignores them too.
IGNORED = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",  # already in the mask
    "use_cache",
}


def register_attention() -> None:
    """Registers the attention implementation "fusedops" with transformers.

    Afterwards `model.set_attn_implementation("fusedops")` and `attn_implementation="fusedops"`
    work, for models whose attention uses transformers' AttentionInterface. `patch` calls this
    function. Imports transformers, and raises ImportError if it is not installed.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa_attention_forward by `attention`, with a softcap and sinks.

    query: [B, Hq, Sq, D]. key, value: [B, Hkv, Sk, D or Dv]. attention_mask: as sdpa_mask makes it,
    True means visible, or numbers to add. None means causal if the module or the argument says so
    and there is more than one query. If the module's config says eager, the mask is eager_mask's:
    numbers, and None hides nothing. position_bias: numbers to add to the mask. s_aux: the sinks,
    [Hq]. Returns [B, Sq, Hq, Dv] and no weights. Calls that `attention` does not support go to
    transformers' own function.
    """
    tensors = query, key, value, attention_mask
    causal = _is_causal(module, query, attention_mask, is_causal)
    extras = position_bias, softcap, s_aux
    if reason := _why_theirs(module, *tensors, *extras, causal, dropout, kwargs):
        if not torch.compiler.is_compiling():
            log.debug("%s runs transformers' attention: %s", type(module).__name__, reason)
        kwargs |= {"is_causal": is_causal, "position_bias": position_bias}
        kwargs |= {"softcap": softcap, "s_aux": s_aux}
        return _theirs(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    if _is_eager(module):
        attention_mask, is_causal = simplest(attention_mask, _scores_dtype(query))
    given = query, key, value, attention_mask, dropout, scaling, is_causal
    return attend(module, *given, position_bias, softcap, s_aux), None


def _why_theirs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    position_bias: Tensor | None,
    softcap: float | None,
    s_aux: Tensor | None,
    causal: bool,
    dropout: float,
    kwargs: dict[str, Any],
) -> str:
    """Why transformers' function runs; empty if `attention` does."""
    eager = _is_eager(module)
    reason = _why_unsupported(eager, query, key, value, mask, position_bias, kwargs)
    biased = position_bias is not None and not inductor_fuses(query)
    plain = softcap is None and s_aux is None and not biased
    if reason:
        return reason
    if query.device.type == "cuda":
        return UNMEASURED if attention_unmeasured(query, value, plain) else ""
    return BY_SIZE if plain and not attention_pays(query, key, mask, causal, dropout) else ""


def _arguments(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a call of attention_forward by name, and its further keyword arguments."""
    call = SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    named = dict(call.arguments)
    return named, named.pop("kwargs")


def _why(*args: Any, **kwargs: Any) -> str:
    """`_why_theirs` of attention_forward's arguments."""
    named, more = _arguments(*args, **kwargs)
    module, query, mask = named["module"], named["query"], named["attention_mask"]
    tensors = query, named["key"], named["value"], mask
    extras = named["position_bias"], named["softcap"], named["s_aux"]
    causal = _is_causal(module, query, mask, named["is_causal"])
    return _why_theirs(module, *tensors, *extras, causal, named["dropout"], more)


def _plain(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """attention_forward's call by the function that the model would have run."""
    named, more = _arguments(*args, **kwargs)
    take = named.pop
    tensors = take("query"), take("key"), take("value"), take("attention_mask")
    return _theirs(take("module"), *tensors, take("dropout"), take("scaling"), more | named)


SIGNATURE = inspect.signature(attention_forward)
decides(
    attention_forward,
    "attention",
    at=lambda module, *args, **kwargs: module,
    why=_why,
    repeat=lambda *args, **kwargs: Repeat(attention_forward, _plain, args, kwargs),
)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Runs attention_forward's call by `attention`, whatever its size and device."""
    causal = _is_causal(module, query, attention_mask, is_causal)
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if position_bias is not None:
            position_bias = position_bias[..., : query.shape[2]]
    bias = _bias(attention_mask, position_bias, key.dtype)
    casts: AbstractContextManager = nullcontext()
    device = query.device.type
    if bias is not None and _is_cast(device) and _adds_in_float32(module, bias):
        to = _scores_dtype(query)
        query, key, value = (t.to(to) for t in (query, key, value))
        casts = torch.autocast(device, enabled=False)
    with casts:
        out: Any = attention(
            query,
            key,
            value,
            causal=causal,
            softcap=softcap,
            sinks=s_aux,
            bias=bias,
            scale=scaling,
            dropout_p=dropout,
        )
    return out.transpose(1, 2).contiguous()


def _is_causal(
    module: nn.Module, query: Tensor, mask: Tensor | None, is_causal: bool | None
) -> bool:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(causal) and mask is None and bool(query.shape[2] > 1)


def _is_cast(device: str) -> bool:
    return is_autocast_available(device) and torch.is_autocast_enabled(device)


def _scores_dtype(query: Tensor) -> torch.dtype:
    """The dtype of eager code's scores. Autocast leaves float64 as it is."""
    return autocast_dtype(query) or query.dtype


def _adds_in_float32(module: nn.Module, bias: Tensor) -> bool:
    """Whether autocast leaves the bias as it is in the model's own code.

    Eager code adds it to the scores. sdpa's call casts it, and the smallest float32 to -inf.
    """
    return bias.dtype == F32 and _is_eager(module)


def _why_unsupported(
    eager: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    position_bias: Tensor | None,
    kwargs: dict[str, Any],
) -> str:
    """Why `attention` cannot take the call; empty if it can. eager: the config says eager."""
    if not eager and F.scaled_dot_product_attention is not SDPA:  # by context parallelism
        return "torch's scaled_dot_product_attention has been replaced"
    for name, given in kwargs.items():
        if not (name in IGNORED or given is None or given is False):
            return f"{name} is set"
    unfit = why_unfit(query, key, value, attention_mask=mask, position_bias=position_bias)
    if unfit:
        return unfit
    if eager and mask is not None and mask.dtype == torch.bool:
        return "attention_mask is bool, but eager code adds it to the scores"
    return ""


def _bias(mask: Tensor | None, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Both as one bias. Like transformers' sdpa, hides keys by the dtype's smallest number.

    So a query that sees no key gets the mean of all values.
    """
    if position_bias is None or mask is None:
        return mask if position_bias is None else position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, torch.finfo(dtype).min)
    return position_bias + mask


def _theirs(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Runs the function that the model would have run.

    That is eager's if it is set, or if sdpa does not support such scores.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scores = kwargs["softcap"] is not None or kwargs["s_aux"] is not None
    run = eager_function(module) if _is_eager(module) or scores else None
    if run is None:
        run = sdpa_attention_forward
    elif not _is_eager(module):
        mask = _as_numbers(module, query, key, mask, kwargs.pop("is_causal"))
    given = {k: v for k, v in kwargs.items() if v is not None}
    return run(module, query, key, value, mask, dropout=dropout, scaling=scaling, **given)


def _is_eager(module: nn.Module) -> bool:
    """Whether the module's attention, and thus its masks, would be eager's without patch."""
    return implementation(getattr(module, "config", None)) == "eager"


def eager_function(module: nn.Module) -> Callable | None:
    """The function that the module's code uses for "eager"."""
    try:
        forward = innermost(original_class(module))
    except Unreadable:
        return None
    names = (n for n in forward.__code__.co_names if n.endswith("eager_attention_forward"))
    return forward.__globals__.get(next(names, ""))


def _as_numbers(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """A mask as eager functions add it: the dtype's smallest number hides a key."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and causal and query.shape[2] > 1:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = seen.tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    least = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least)
