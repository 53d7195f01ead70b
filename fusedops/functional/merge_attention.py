"""merge_attention: merges attention over parts of the keys into attention over all keys.

Liu et al., arXiv:2310.01889, and Milakov and Gimelshein, arXiv:1805.02867, for the sums.
"""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

__all__ = ["merge_attention"]


def merge_attention(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges what `attention(return_lse=True)` gives for the same queries over disjoint keys.

        lse = log(sum_i exp(lses_i)), out = sum_i exp(lses_i - lse) outs_i

    outs: one per part, all [B, Hq, Sq, Dv] or all [tokens, Hq, Dv], in one dtype. lses: one per
    part, [B, Hq, Sq] or [Hq, tokens]. Returns (out, lse) as `attention` does over all keys: out in
    outs' dtype and outs[0]'s memory order, lse in float32 (float64 if outs or lses are). Sums are
    in lse's dtype. Both outputs have gradients of any order for outs and lses.

    A part whose lse is -inf for a query saw none of its keys. What outs has there is not read, and
    its gradient is 0. A query that no part saw gets zeros and -inf. Sinks are one more score per
    head: pass them to one part only. Dropout is the parts' own. Raises ValueError if there is no
    part, or not one lse for each, TypeError if a part is no tensor, and RuntimeError if shapes,
    dtypes or devices do not fit.
    """
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    wide = torch.float64 if torch.float64 in (outs[0].dtype, lses[0].dtype) else torch.float32
    lses = [lse.to(wide) for lse in lses]
    # The shift only keeps exp in range: the result does not depend on it, so it has no gradient.
    shift = reduce(torch.maximum, (lse.detach() for lse in lses))
    unseen = shift == -torch.inf
    shift = torch.where(unseen, 0, shift)
    weights = [(lse - shift).exp() for lse in lses]
    total = torch.where(unseen, 1, sum(weights[1:], weights[0]))
    packed = outs[0].dim() == 3
    parts = zip(outs, lses, weights, strict=True)
    scaled = [_scaled(out, lse, w / total, packed) for out, lse, w in parts]
    out = sum(scaled[1:], scaled[0])
    return out.to(outs[0].dtype), torch.where(unseen, -torch.inf, shift + total.log())


def _scaled(out: Tensor, lse: Tensor, weight: Tensor, packed: bool) -> Tensor:
    lse, weight = ((t.T if packed else t)[..., None] for t in (lse, weight))
    seen = out.clone().masked_fill_(lse == -torch.inf, 0)  # in out's memory order, unlike where's
    return seen * weight


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            "merge_attention: outs and lses must have the same number of parts, at least one, got "
            f"{len(outs)} and {len(lses)}"
        )
    for name, parts in (("outs", outs), ("lses", lses)):
        for i, part in enumerate(parts):
            if not isinstance(part, Tensor):
                got = type(part).__name__
                raise TypeError(f"merge_attention: {name}[{i}] must be a tensor, got {got}")
    first = outs[0]
    if first.dim() not in (3, 4):
        raise RuntimeError(
            "merge_attention: outs must be [B, Hq, Sq, Dv] or [tokens, Hq, Dv], got "
            f"{list(first.shape)}"
        )
    rows = first.shape[:-1] if first.dim() == 4 else first.shape[-2::-1]
    expected = {"outs": (first.shape, first.dtype), "lses": (rows, lses[0].dtype)}
    for name, parts in (("outs", outs), ("lses", lses)):
        shape, dtype = expected[name]
        for i, part in enumerate(parts):
            if part.shape != shape or part.dtype != dtype or part.device != first.device:
                raise RuntimeError(
                    f"merge_attention: {name}[{i}] must be {dtype} {list(shape)} on "
                    f"{first.device}, got {part.dtype} {list(part.shape)} on {part.device}"
                )
    if not (first.is_floating_point() and lses[0].is_floating_point()):
        raise RuntimeError(
            "merge_attention: outs and lses must be floating-point tensors, got "
            f"{first.dtype} and {lses[0].dtype}"
        )
