"""cross_entropy, linear_cross_entropy and linear_log_probs.

The softmax's denominator takes one pass over the logits: Milakov and Gimelshein, arXiv:1805.02867.
The functions of a linear layer compute its logits one tile at a time: Wijmans et al.,
arXiv:2411.09009.
"""

import torch
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from fusedops.extension import _C, ops, traced
from fusedops.functional.sharded import replicated_in_float64

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_log_probs"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    grad_in_forward: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`F.cross_entropy` in one pass over the logits forward and one backward.

        z = softcap tanh(scale input / softcap)      without a softcap: scale input
        lse = log sum_c exp(z_c)
        loss = w_t ((1 - a) (lse - z_t) + z_loss lse^2) + a / C sum_c w_c (lse - z_c)

    where a = label_smoothing. input: logits [C], [N, C] or [N, C, ...], float32, float16, bfloat16
    or float64, any strides. The kernels need a row's classes to be adjacent in memory, as in
    `logits.transpose(1, 2)`; otherwise the definition in `fusedops/references` runs. target: int64
    class indices of input's shape without C, or probabilities of input's shape. Probabilities run
    the definition, and their z_loss has w_t = 1. weight: [C]. reduction: "mean" over the w_t of
    targets that are not ignored (over N for probabilities), "sum" or "none". If every target is
    ignored, the mean is NaN, as in torch, and the gradients are zeros. If the remaining targets all
    have weight 0, both are NaN.

    Returns the loss in dtype, by default the input's: `cross_entropy(x, t, dtype=torch.float32)` is
    `F.cross_entropy(x.float(), t)` without the copy. Under autocast the loss is float32, as in
    torch. Computation is in float32; for float64 inputs, computation and loss are float64. The
    logits are never written to.

    By default, the backward computes the gradient. With grad_in_forward, the forward computes it:
    it reads the logits one time less and stores the gradient instead of the logits. That gradient
    is rounded before it is scaled by the loss's own gradient, and has no double backward.
    grad_in_forward has no effect where the definition runs, or for float16, which would underflow
    before a GradScaler's factor is applied.

    Raises RuntimeError if a shape, a dtype or label_smoothing does not fit, IndexError for a target
    that is not a class (on a GPU its loss is NaN), and ValueError for an unknown reduction or
    invalid softcap. Szegedy et al., arXiv:1512.00567 (label_smoothing); Chowdhery et al.,
    arXiv:2204.02311 (z_loss).
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    options = ignore_index, reduction, label_smoothing
    if weight is not None:
        # float64's formula takes torch's loss; 2.13's mean over sharded rows ignores the weights of
        # other ranks
        input, target, weight = replicated_in_float64(input, target, weight)
    if traced(input, target, weight):
        return ops.cross_entropy(
            input,
            target,
            weight,
            *options,
            z_loss=z_loss,
            softcap=softcap,
            scale=scale,
            grad_in_forward=grad_in_forward,
            dtype=dtype,
        )
    return _C.cross_entropy(
        input, target, weight, *options, z_loss, softcap, scale, grad_in_forward, dtype
    )


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    options: object = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`cross_entropy(F.linear(input, linear_weight, linear_bias), target)` without the logits.

    The logits exist only one tile at a time. input: [..., H]. linear_weight: [C, H]. target: int64
    class indices [...]. linear_bias, weight: [C]. input and linear_weight share a dtype: float32,
    float16 or bfloat16, with any strides. Three cases run the definition in `fusedops/references`,
    with all logits in memory: float64, probabilities as targets, and the linear_weight
    [C, d1, ..., H] of a K-dimensional loss. The other arguments, the formula and the result are
    `cross_entropy`'s.

    Tiles and sums are float32. CPUs with fast bfloat16 matmuls use bfloat16 tiles, rounded as
    eager's logits are. For 16-bit inputs, the backward recomputes the logits: this costs one matmul
    and saves the float32 sum of the weight's gradient. For float32, or bfloat16 with a frozen
    linear_weight, the forward computes the gradients of "mean" and "sum", in blocks of at least 128
    rows. bfloat16 gradients are rounded before they are scaled by the loss's own gradient. On a
    CPU, rows with an ignored target cost nothing. `options` chooses torch's chunks and has no
    effect here. Raises what `cross_entropy` raises.
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    tensors = input, linear_weight, target, linear_bias, weight
    if traced(*tensors):
        return ops.linear_cross_entropy(
            *tensors[:3],
            linear_bias=linear_bias,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            scale=scale,
            dtype=dtype,
        )
    return _C.linear_cross_entropy(  # by position: names cost a microsecond
        *tensors, ignore_index, reduction, label_smoothing, z_loss, softcap, scale, dtype
    )


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_top1: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Each target's log-probability under a linear layer's softmax, without the logits.

        x = F.linear(input, linear_weight, linear_bias)
        z = softcap tanh(scale x / softcap) / temperature   without a softcap: scale x / temperature
        log_probs = log_softmax(z)[target]                  minus each row's linear_cross_entropy
        entropy = -sum_c p_c log p_c                        p = softmax(z)
        top1 = (argmax_c z_c == target)                     the first of equal classes

    Shapes, dtypes and tiles are `linear_cross_entropy`'s; target must be int64. Returns log_probs,
    with return_entropy also entropy, with return_top1 also top1, all of target's shape. log_probs
    and entropy have gradients, also together; top1 is bool. dtype is theirs, by default input's,
    float32 under autocast. Rows with an ignored target get 0, 0 and False, and cost nothing on a
    CPU. A class whose logit is -inf adds 0 to the entropy. A row with a NaN gets NaN, NaN and
    False. The backward recomputes the logits.

    This is what the trainers of DPO (Rafailov et al., arXiv:2305.18290) and GRPO (Shao et al.,
    arXiv:2402.03300) need from a model's head. On a GPU torch's operators process the tiles.

    Raises RuntimeError if a shape or dtype does not fit, IndexError for a target that is not a
    class (on a GPU its results are NaN), and ValueError for a temperature or softcap that is not
    positive and finite.
    """
    tensors = input, linear_weight, target
    returned = return_entropy, return_top1
    if traced(*tensors, linear_bias):
        outputs = ops.linear_log_probs(
            *tensors,
            linear_bias=linear_bias,
            ignore_index=ignore_index,
            softcap=softcap,
            scale=scale,
            temperature=temperature,
            return_entropy=return_entropy,
            return_top1=return_top1,
            dtype=dtype,
        )
    else:
        outputs = _C.linear_log_probs(
            *tensors, linear_bias, ignore_index, softcap, scale, temperature, *returned, dtype
        )
    log_probs = outputs[0]
    more = [outputs[1 + i] for i, asked in enumerate(returned) if asked]
    return (log_probs, *more) if more else log_probs
