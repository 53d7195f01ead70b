"""Cross entropy's functions and modules for the memory-growth tests in tests/growth."""

from growth.subject import BF16, F32, ROWS, N, Subject, fixed, leaf, nn_module, numbers

from fusedops import functional as F
from fusedops import nn

NO_DOUBLE_BACKWARD = {"double backward": "grad_in_forward keeps no logits for it"}


def cross_entropy(*, dtype=F32, loss_dtype=None, weight: bool = False, left=None, **options):
    def run(logits, target, *rest):
        return F.cross_entropy(logits, target, *rest, dtype=loss_dtype, **options)

    def inputs():
        given = [leaf(ROWS, N, dtype=dtype), numbers(ROWS, below=N)]
        return [*given, fixed(N).abs()] if weight else given

    return Subject(run, inputs, left=left or {})


def probabilities():
    def inputs():
        return [leaf(ROWS, N), fixed(ROWS, N).softmax(-1)]

    return Subject(F.cross_entropy, inputs)


def linear_cross_entropy(*, dtype=F32, frozen: bool = False, bias=False, weight=False, **options):
    names = [name for name, there in {"linear_bias": bias, "weight": weight}.items() if there]

    def run(x, linear_weight, target, *rest):
        more = dict(zip(names, rest, strict=True))
        return F.linear_cross_entropy(x, linear_weight, target, **more, **options)

    def inputs():
        head = fixed(N, 32, dtype=dtype) if frozen else leaf(N, 32, dtype=dtype)
        given = [leaf(ROWS, 32, dtype=dtype), head, numbers(ROWS, below=N)]
        given += [leaf(N, dtype=dtype)] if bias else []
        return [*given, fixed(N).abs()] if weight else given

    return Subject(run, inputs)


def linear_log_probs(*, dtype=F32, bias=False, **options):
    def run(x, linear_weight, target, *rest):
        given = {"linear_bias": rest[0]} if rest else {}
        return F.linear_log_probs(x, linear_weight, target, **given, **options)

    def inputs():
        given = [leaf(ROWS, 32, dtype=dtype), leaf(N, 32, dtype=dtype), numbers(ROWS, below=N)]
        return [*given, leaf(N, dtype=dtype)] if bias else given

    return Subject(run, inputs)


def logits():
    return [leaf(ROWS, N), numbers(ROWS, below=N)]


OPERATORS = {
    "cross_entropy": lambda: cross_entropy(),
    "cross_entropy, options": lambda: cross_entropy(
        dtype=BF16, weight=True, ignore_index=3, label_smoothing=0.1, z_loss=1e-3, softcap=30.0,
        scale=0.5, reduction="sum", loss_dtype=F32,
    ),
    "cross_entropy, each row's": lambda: cross_entropy(reduction="none"),
    "cross_entropy, grad_in_forward": lambda: cross_entropy(
        grad_in_forward=True, left=NO_DOUBLE_BACKWARD
    ),
    "cross_entropy, probabilities": probabilities,
    "linear_cross_entropy": lambda: linear_cross_entropy(),
    "linear_cross_entropy, bfloat16": lambda: linear_cross_entropy(dtype=BF16, bias=True),
    "linear_cross_entropy, frozen": lambda: linear_cross_entropy(dtype=BF16, frozen=True),
    "linear_cross_entropy, options": lambda: linear_cross_entropy(
        bias=True, weight=True, ignore_index=3, label_smoothing=0.1, z_loss=1e-3, softcap=30.0,
        scale=0.5, reduction="none",
    ),
    "linear_log_probs": lambda: linear_log_probs(),
    "linear_log_probs, options": lambda: linear_log_probs(
        dtype=BF16, bias=True, ignore_index=3, softcap=30.0, scale=0.5, temperature=0.7,
        return_entropy=True,
    ),
}  # fmt: skip

MODULES = {
    "CrossEntropyLoss": lambda: nn_module(nn.CrossEntropyLoss(fixed(N).abs()), logits),
    "LinearCrossEntropyLoss": lambda: nn_module(
        nn.LinearCrossEntropyLoss(N, 48, bias=True, z_loss=1e-4),
        lambda: [leaf(ROWS, N), numbers(ROWS, below=48)],
    ),
}
