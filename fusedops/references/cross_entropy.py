"""The definitions of cross_entropy, linear_cross_entropy and linear_log_probs.

Plain PyTorch in float32 (float64 for float64), rounded once to the result's dtype. A linear layer's
logits have the input's dtype. The arguments' order is the operators'.
"""

import torch
import torch.nn.functional as F


def cross_entropy_reference(
    input,
    target,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    scale=None,
    dtype=None,
    *,
    grad_in_forward=False,
):
    z = _z(input, softcap, scale)
    weight = None if weight is None else weight.to(z.dtype)
    target = target.to(z.dtype) if target.is_floating_point() else target.long()
    # torch's mean divides each rank's rows of a DTensor by its own number of targets.
    by_rank = reduction == "mean" and hasattr(z, "placements") and not target.is_floating_point()
    loss = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum" if by_rank else reduction,
        label_smoothing=label_smoothing,
    )
    if by_rank:
        loss = loss / _target_weight(target, weight, ignore_index, z.dtype).sum()
    if z_loss != 0:
        loss = loss + z_loss * _squares(z, target, weight, ignore_index, reduction)
    return loss.to(_result_dtype(input, dtype))


def linear_cross_entropy_reference(
    input,
    linear_weight,
    target,
    linear_bias=None,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    scale=None,
    dtype=None,
):
    options = weight, ignore_index, reduction, label_smoothing, z_loss, softcap, scale, dtype
    classes = linear_weight.shape[:-1]
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    if len(classes) == 1 and input.dim() > 2:
        target = target.flatten(0, -2) if target.is_floating_point() else target.flatten()
        loss = cross_entropy_reference(logits.flatten(0, -2), target, *options)
        return loss.view(input.shape[:-1]) if loss.dim() else loss
    logits = logits if len(classes) == 1 else logits.unflatten(-1, classes)
    return cross_entropy_reference(logits, target, *options)


def cross_entropy_sums_reference(input, target, weight, ignore_index, softcap, scale):
    """What a backward kernel needs: each row's lse, and the sum of the w_t. Both are float64."""
    lse = torch.logsumexp(_z(input.double(), softcap, scale), -1)
    return lse, _target_weight(target, weight, ignore_index, torch.float64).sum()


def linear_log_probs_reference(
    input,
    linear_weight,
    target,
    linear_bias=None,
    ignore_index=-100,
    softcap=None,
    scale=None,
    return_entropy=False,
    return_top1=False,
    dtype=None,
    *,
    temperature=1.0,
):
    """Returns log_probs, entropy and top1. An output that was not requested is None."""
    z = _z(F.linear(input, linear_weight, linear_bias), softcap, scale)
    z = z if temperature == 1 else z / temperature
    log_p = torch.log_softmax(z, -1)
    live, dtype = target != ignore_index, _result_dtype(input, dtype)
    index = torch.where(live, target, 0).reshape(-1)
    rows = log_p.reshape(index.shape[0], log_p.shape[-1])
    # gather fails on sharded classes
    picked = -F.nll_loss(rows, index, ignore_index=ignore_index, reduction="none")
    log_probs = torch.where(live, picked.view(target.shape), 0)
    entropy = top1 = None
    if return_entropy:
        finite = log_p.clamp_min(torch.finfo(torch.float32).min)  # where p is 0
        entropy = torch.where(live, -(log_p.exp() * finite).sum(-1), 0).to(dtype)
    if return_top1:
        top = live if z.numel() == 0 else z.argmax(-1) == target
        top1 = live & top & ~log_probs.isnan()
    return log_probs.to(dtype), entropy, top1


def _z(logits, softcap, scale):
    """The scaled and capped logits, in float32 (float64)."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z if scale is None else z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def _result_dtype(input, dtype):
    return input.dtype if dtype is None or input.dtype == torch.float64 else dtype


def _squares(z, target, weight, ignore_index, reduction):
    """The squares of lse, reduced as the loss is. Those of probabilities have no weight."""
    squares = torch.logsumexp(z, min(1, z.dim() - 1)) ** 2
    w = torch.ones_like(squares)
    if not target.is_floating_point():
        w = _target_weight(target, weight, ignore_index, z.dtype)
    squares = torch.where(w != 0, squares * w, 0)
    if reduction == "none":
        return squares
    return squares.sum() / w.sum() if reduction == "mean" else squares.sum()


def _target_weight(target, weight, ignore_index, dtype):
    """w_t of each target, 0 for an ignored one."""
    live = target != ignore_index
    if weight is None:
        return live.to(dtype)
    return torch.where(live, weight.to(dtype)[torch.where(live, target, 0)], 0)
