"""linear_cross_entropy matches its reference on every backend."""

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from benchmarks.harness.memory import profiled
from cross_entropy.cases import (
    BACKENDS,
    F32,
    FLOATS,
    OPTIONS,
    PRODUCTS,
    class_weight,
    compare_linear,
    head,
    runs,
    targets,
)
from fusedops.functional import linear_cross_entropy
from fusedops.references.cross_entropy import linear_cross_entropy_reference
from fusedops.testing import check, device_of, placed, poisoned, threads, yardstick

# rows, features, classes: one element, odd, past a tile of the kernels in each direction
SHAPES = [(1, 1, 1), (40, 33, 19), (40, 64, 1025), (1030, 16, 2100)]
ON = pytest.mark.parametrize("backend", BACKENDS)


@grid(
    ON,
    PRODUCTS,
    pytest.mark.parametrize("more", [False, True], ids=["", "weight and bias"]),
    dtype=FLOATS,
    options=OPTIONS,
    shape=SHAPES,
    only=runs,
)
def test_forward_and_gradients(backend, dtype, options, shape, more, products):
    rows, _, classes = shape
    x, w, b = head(*shape, dtype)
    args = (x, w, targets(rows, classes), b) if more else (x, w, targets(rows, classes))
    weight = class_weight(classes, dtype) if more else None
    compare_linear(args, backend, weight, **OPTIONS[options])


@grid(
    ON,
    PRODUCTS,
    dtype=FLOATS,
    reduction=["mean", "none"],
    shape=[(50, 40, 160), (300, 40, 1500)],
    only=runs,
)
def test_a_frozen_weight(backend, dtype, reduction, shape, products):
    """Input and bias have gradients, then only the bias."""
    rows, _, classes = shape
    x, w, b = head(*shape, dtype)
    target = targets(rows, classes)
    compare_linear((x, w, target, b), backend, reduction=reduction)

    def of(run, *leaves, **options):
        x, b = (t.clone().requires_grad_() for t in leaves)
        loss = run(x, w.to(x.dtype), target, linear_bias=b, reduction=reduction)
        cotangent = torch.full_like(loss, 0.5)
        both = torch.autograd.grad(loss, (x, b), cotangent, retain_graph=True)
        return *both, *torch.autograd.grad(loss, b, cotangent)

    x, w, target, b = placed((x, w, target, b), device_of(backend))
    with fusedops.backend(backend), poisoned():
        actual = of(linear_cross_entropy, x, b)
    eager = of(linear_cross_entropy_reference, x, b)
    exact = of(linear_cross_entropy_reference, x.double(), b.double())
    for values in zip(actual, eager, exact, strict=True):
        assert yardstick(*values) is None


@grid(ON, PRODUCTS, dtype=FLOATS, shape=[(60, 40, 250)], only=runs)
def test_a_float32_loss(backend, dtype, products, shape):
    x, w, _ = head(*shape, dtype)
    compare_linear((x, w, targets(60, 250)), backend, dtype=F32)


@grid(ON, shape=[(0, 5, 7), (6, 0, 7), (0, 5, 0)], reduction=["mean", "sum", "none"])
def test_empty(backend, shape, reduction):
    x, w, b = head(*shape)
    compare_linear((x, w, targets(shape[0], shape[2]), b), backend, reduction=reduction)


@grid(ON, reduction=["mean", "sum", "none"], dtype=[torch.float32, torch.float16])
def test_every_target_is_ignored(backend, reduction, dtype):
    leaves = placed(head(6, 12, 40, dtype), device_of(backend))
    leaves = [t.requires_grad_() for t in leaves]
    x, w, b = leaves
    with fusedops.backend(backend), poisoned():
        target = torch.full((6,), -100, device=x.device)
        loss = linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), leaves)
    assert loss.isnan().all() if reduction == "mean" else not loss.count_nonzero()
    assert not any(g.count_nonzero() for g in grads)


@ON
def test_ignored_rows_are_not_looked_at(backend):
    x, w, _ = head(9, 12, 40)
    target = targets(9, 40, ignored=False)
    x[4], target[4] = torch.nan, -100
    x, w, target = placed((x, w, target), device_of(backend))
    x.requires_grad_()
    with fusedops.backend(backend):
        loss = linear_cross_entropy(x, w, target)
        (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and not grad[4].count_nonzero()
    assert grad[[0, 8]].isfinite().all() and grad[8].count_nonzero()


@ON
def test_dimensions_of_rows(backend):
    x, w, b = head(24, 16, 50)
    target = targets(24, 50)
    for shape in ((2, 3, 4), (24,), (1, 24)):
        for reduction in ("mean", "none"):
            args = x.view(*shape, 16), w, target.view(shape), b
            compare_linear(args, backend, reduction=reduction)
    compare_linear((x[0], w, target[0], b), backend)


@ON
def test_strides(backend):
    x, w, b = head(24, 16, 50)
    target = targets(24, 50)
    for view in (
        (x.t().contiguous().t(), w.t().contiguous().t(), b),
        (x[::2].repeat_interleave(2, 0)[::1], w, b[:1].expand(50)),
        (x[:, :8], w[:, 8:], b),
        (x.flip(0)[:1].expand(24, -1), w.repeat(2, 1)[::2], b.repeat(2)[::2]),
    ):
        compare_linear((view[0], view[1], target, view[2]), backend)


@ON
def test_the_backward_may_run_again(backend):
    """Only the last backward gives away the gradients that the forward computed."""
    x, w, _ = head(20, 16, 50)
    x, w, target = placed((x, w, targets(20, 50)), device_of(backend))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    with fusedops.backend(backend):
        loss = linear_cross_entropy(x, w, target)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        kept = [g.clone() for g in first]
        for g in first:
            g.zero_()
        second = torch.autograd.grad(loss, leaves, torch.tensor(2.0).to(x), retain_graph=True)
        third = torch.autograd.grad(loss, leaves)
    for g1, g2, g3 in zip(kept, second, third, strict=True):
        assert torch.equal(g1 * 2, g2) and torch.equal(g1, g3)


def same_for_threads(x, w, b):
    """Whether MKL sums the products of a tile in one order, as on AMD's CPUs and under MKL_CBWR."""

    def products():
        logits = torch.addmm(b, x, w.t())
        return logits, logits @ w, logits.t() @ x

    with threads(1):
        alone = products()
    with threads(3):
        return all(map(torch.equal, alone, products()))


@grid(dtype=FLOATS, reduction=["mean", "none"])
def test_threads_do_not_change_the_bits(dtype, reduction):
    leaves = [t.requires_grad_() for t in head(1030, 96, 2100, dtype)]
    target = targets(1030, 2100)
    if not same_for_threads(*head(1024, 96, 1024, torch.float32)):
        pytest.skip("torch's own float32 product of this CPU has other bits on more threads")

    def run():
        x, w, b = leaves
        loss = linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
        return loss.detach(), *torch.autograd.grad(loss, leaves, torch.ones_like(loss))

    with threads(1):
        alone = run()
    with threads(3):
        assert all(map(torch.equal, alone, run()))


@ON
def test_gradients_add_up_in_leaves(backend):
    x, w, _ = head(20, 16, 50)
    x, w, target = placed((x, w, targets(20, 50)), device_of(backend))
    w.requires_grad_()
    with fusedops.backend(backend):
        loss = linear_cross_entropy(x, w, target)
        loss.backward(retain_graph=True)
        once = w.grad.clone()
        loss.backward()
    assert torch.equal(w.grad, 2 * once)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_targets_are_added_last(reduction):
    """At most half of eager's error, because no partial sum is rounded at the targets' size."""
    x, w, _ = head(256, 64, 4000)
    w, target = w / 8, targets(256, 4000, ignored=False)

    def gradients(run, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        return torch.autograd.grad(run(*leaves, target, reduction=reduction).sum(), leaves)

    actual = gradients(linear_cross_entropy, F32)
    eager = gradients(linear_cross_entropy_reference, F32)
    exact = gradients(linear_cross_entropy_reference, torch.float64)
    for ours, theirs, true in zip(actual, eager, exact, strict=True):
        assert (ours - true).norm() < (theirs - true).norm() / 2


def test_a_target_that_is_no_class():
    x, w, _ = head(5, 4, 10)
    target = targets(5, 10, ignored=False)
    target[3] = 10
    for ignored in (slice(0), slice(1, 3)):
        target[ignored] = -100
        with pytest.raises(IndexError, match=r"linear_.*: target .* 0 to 9 .* got 10 in row 3"):
            linear_cross_entropy(x, w, target)


def test_arguments_of_torch_alone():
    x, w, _ = head(5, 4, 10)
    target = targets(5, 10)
    loss = linear_cross_entropy(x, w, target, ignore_index=None, options=None)
    assert torch.equal(loss, linear_cross_entropy(x, w, target))


@ON
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_scaled_float16_loss(backend, trained):
    """A GradScaler's factor comes before the gradient of a mean is rounded to float16, where that
    of so many rows is below the normal numbers."""
    rows, classes = (8, 200) if interpreted(backend) else (70000, 20)
    x, w, _ = head(rows, 16, classes, torch.float16)
    target = targets(rows, classes)
    head_weight = placed((w,), device_of(backend))[0]

    def of(run):
        def scaled(x, t, w=None):
            w = head_weight.to(x.dtype) if w is None else w
            return run(x, w, t, dtype=F32) * 2**8

        return scaled

    args = (x, target, w) if trained else (x, target)
    check(of(linear_cross_entropy), of(linear_cross_entropy_reference), args, backend)


class Masks(TorchDispatchMode):
    """Records which gradients each forward is asked to compute."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "linear_cross_entropy_forward":
            self.seen.append(args[-1])
        return func(*args, **kwargs or {})


def test_gradients_that_nobody_wants_are_not_made():
    x, w, b = head(6, 4, 10)
    for mask in ([True, False, False], [False, True, False], [True, False, True]):
        x, w, b = (t.detach().requires_grad_(on) for t, on in zip((x, w, b), mask, strict=True))
        with Masks() as masks:
            linear_cross_entropy(x, w, targets(6, 10), linear_bias=b)
        assert masks.seen == [mask]


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_the_logits_never_exist(dtype):
    """Scratch memory is at most a quarter of the float32 logits."""
    x, w, _ = head(2048, 8, 4096, dtype)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    target = targets(2048, 4096)
    memory = profiled(lambda: torch.autograd.grad(linear_cross_entropy(x, w, target), leaves))
    assert memory.peak - memory.results < 2048 * 4096 * 4 / 4
