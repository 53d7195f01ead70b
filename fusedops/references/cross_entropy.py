"""The definitions of cross_entropy, linear_cross_entropy and linear_log_probs.

Plain PyTorch in the input's dtype, exact for float64 inputs.
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
    *,
    z_loss=0.0,
    softcap=None,
    scale=None,
    grad_in_forward=False,
    dtype=None,
):
    z = input if dtype in (None, input.dtype) or input.dtype == torch.float64 else input.to(dtype)
    z = z if scale is None else z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    weight = None if weight is None else weight.to(z.dtype)
    target = target.long() if target.dtype == torch.uint8 else target
    loss = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if z_loss == 0:
        return loss
    squares = z_loss * torch.logsumexp(z, min(1, z.dim() - 1)) ** 2
    if target.is_floating_point():
        counted = torch.ones_like(squares)
    else:
        live = target != ignore_index
        counted = live if weight is None else live * weight[torch.where(live, target, 0)]
    squares = torch.where(counted != 0, squares * counted, 0)
    if reduction == "none":
        return loss + squares
    return loss + (squares.sum() / counted.sum() if reduction == "mean" else squares.sum())


def linear_cross_entropy_reference(
    input, linear_weight, target, *, linear_bias=None, dtype=None, **options
):
    classes = linear_weight.shape[:-1]
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias)
    if len(classes) == 1 and input.dim() > 2:
        target = target.flatten(0, -2) if target.is_floating_point() else target.flatten()
        loss = cross_entropy_reference(logits.flatten(0, -2), target, dtype=dtype, **options)
        return loss.view(input.shape[:-1]) if loss.dim() else loss
    logits = logits.unflatten(-1, classes)
    return cross_entropy_reference(logits, target, dtype=dtype, **options)


def linear_log_probs_reference(
    input,
    linear_weight,
    target,
    *,
    linear_bias=None,
    ignore_index=-100,
    softcap=None,
    scale=None,
    temperature=1.0,
    return_entropy=False,
    return_top1=False,
    dtype=None,
):
    """Returns log_probs, entropy and top1. An output that was not asked for is None."""
    z = F.linear(input, linear_weight, linear_bias)
    z = z if dtype in (None, z.dtype) or z.dtype == torch.float64 else z.to(dtype)
    options = softcap, scale, temperature, return_entropy, return_top1
    return log_probs_of_logits(z, target, ignore_index, *options)


def log_probs_of_logits(
    z, target, ignore_index, softcap, scale, temperature, return_entropy, return_top1
):
    z = z if scale is None else z * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / temperature
    log_p = torch.log_softmax(z, -1)
    live = target != ignore_index
    index = torch.where(live, target, 0).unsqueeze(-1)
    log_probs = torch.where(live, log_p.gather(-1, index).squeeze(-1), 0)
    entropy = top1 = None
    if return_entropy:
        finite = log_p.clamp_min(torch.finfo(z.dtype).min)  # where p is 0
        entropy = torch.where(live, -(log_p.exp() * finite).sum(-1), 0)
    if return_top1:
        top1 = live & (z.argmax(-1) == target) & ~log_probs.isnan()
    return log_probs, entropy, top1
