"""cross_entropy's benchmark contenders: torch, Hugging Face, torch.compile and fusedops.

Hugging Face first copies the logits to float32 (`ForCausalLMLoss`); ours computes the same float32
loss without the copy. Plain eager gives a loss in the logits' dtype.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, compiled, traffic
from fusedops.references.cross_entropy import cross_entropy_reference

Loss = Callable[..., Tensor]

SMOOTHING, SOFTCAP = 0.1, 30.0


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits [rows, classes] and their targets."""
    rows, classes = shape
    x = torch.randn(rows, classes, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randint(classes, (rows,), device=device)


def lines(smoothing: float, softcap: float | None) -> tuple[Loss, Loss]:
    """Code as in models: on the logits themselves, and on a float32 copy."""

    def capped(x: Tensor) -> Tensor:
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    def eager(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(capped(x), target, label_smoothing=smoothing)

    def huggingface(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(capped(x).float(), target, label_smoothing=smoothing)

    return eager, huggingface


def contenders(eager: Loss, huggingface: Loss, fused: Loss) -> dict[str, Contender]:
    """Functions of the inputs; models' code also compiled."""

    def of(loss: Loss) -> Contender:
        return Contender(lambda *tensors: partial(loss, *tensors))

    return {
        "eager": of(eager),
        "huggingface": of(huggingface),
        "compile(huggingface)": compiled(of(huggingface)),
        "fusedops": of(fused),
    }


def operation(
    name: str,
    smoothing: float = 0.0,
    softcap: float | None = None,
    grad_in_forward: bool = False,
) -> Operation:
    """Forward reads the logits. Backward reads them again and writes the gradient.

    With grad_in_forward, the forward writes it, and backward moves nothing.
    """
    options = {"label_smoothing": smoothing, "softcap": softcap, "dtype": torch.float32}
    fused = partial(ours.cross_entropy, **options, grad_in_forward=grad_in_forward)
    return Operation(
        name,
        inputs,
        partial(cross_entropy_reference, **options),
        traffic(1, 1 if grad_in_forward else 2),
        contenders(*lines(smoothing, softcap), fused),
    )


PLAIN = operation("cross_entropy")
IN_FORWARD = operation("cross_entropy, grad_in_forward", grad_in_forward=True)
SMOOTHED = operation("cross_entropy, label_smoothing", smoothing=SMOOTHING)
CAPPED = operation("cross_entropy, softcap", softcap=SOFTCAP)
