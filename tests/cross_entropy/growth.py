"""Cross entropy's further functions and modules for the memory-growth tests in tests/growth."""

from growth.subject import BF16, ROWS, N, Subject, fixed, leaf, nn_module, numbers

from fusedops import functional as F
from fusedops import nn

NO_DOUBLE_BACKWARD = {"double backward": "grad_in_forward keeps no logits for it"}


def logits():
    return [leaf(ROWS, N), numbers(ROWS, below=N)]


def in_forward():
    run = lambda z, target: F.cross_entropy(z, target, grad_in_forward=True)  # noqa: E731
    return Subject(run, logits, left=NO_DOUBLE_BACKWARD)


def probabilities():
    return Subject(F.cross_entropy, lambda: [leaf(ROWS, N), fixed(ROWS, N).softmax(-1)])


def frozen():
    """A head in bfloat16 that is not trained."""

    def inputs():
        return [leaf(ROWS, 32, dtype=BF16), fixed(N, 32, dtype=BF16), numbers(ROWS, below=N)]

    return Subject(F.linear_cross_entropy, inputs)


OPERATORS = {
    "cross_entropy, grad_in_forward": in_forward,
    "cross_entropy, probabilities": probabilities,
    "linear_cross_entropy, frozen": frozen,
}

MODULES = {
    "CrossEntropyLoss": lambda: nn_module(nn.CrossEntropyLoss(fixed(N).abs()), logits),
    "LinearCrossEntropyLoss": lambda: nn_module(
        nn.LinearCrossEntropyLoss(N, 48, bias=True, z_loss=1e-4),
        lambda: [leaf(ROWS, N), numbers(ROWS, below=48)],
    ),
}
