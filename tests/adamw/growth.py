"""clip_grad_norm_'s calls for the memory-growth tests in tests/growth."""

from growth.subject import ROWS, N, Subject, leaf

from fusedops import functional as F


def clipped():
    """Clips two gradients, each of which is a copy of an input."""

    def run(a, b):
        pair = [t.detach().requires_grad_() for t in (a, b)]
        for t, grad in zip(pair, (a, b), strict=True):
            t.grad = grad.detach().clone()
        return a.sum() * F.clip_grad_norm_(pair, 1.0)

    left = {
        "torch.func": "sets .grad, which no transform allows",
        "exception in operator": "takes gradients of any shape",
    }
    return Subject(run, lambda: [leaf(ROWS, N), leaf(N)], left=left)


OPERATORS = {
    "clip_grad_norm_": clipped,
}  # fmt: skip
