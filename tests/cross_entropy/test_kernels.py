"""cross_entropy matches its reference on every backend."""

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from contract.interpreter import interpreted

import fusedops
from cross_entropy.cases import (
    BACKENDS,
    F32,
    FLOATS,
    OPTIONS,
    class_weight,
    compare,
    logits,
    runs,
    targets,
)
from fusedops.functional import cross_entropy
from fusedops.references.cross_entropy import cross_entropy_reference
from fusedops.testing import check, device_of, placed, poisoned, threads, yardstick

# one element, odd, past a block of the kernels, many short rows, a vocabulary
SHAPES = [(1, 1), (31, 33), (9, 1024), (7, 2051), (130, 5), (9, 32000)]
ON = pytest.mark.parametrize("backend", BACKENDS)


@grid(
    ON,
    pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"]),
    dtype=FLOATS,
    options=OPTIONS,
    shape=SHAPES,
    only=runs,
)
def test_forward_and_gradients(backend, dtype, options, shape, weighted):
    weight = class_weight(shape[1], dtype) if weighted else None
    args = logits(*shape, dtype), targets(*shape)
    compare(args, backend, weight, **OPTIONS[options])


@grid(ON, dtype=[torch.float16, torch.bfloat16], reduction=["mean", "none"], only=runs)
def test_a_float32_loss_of_16_bits(backend, dtype, reduction):
    """Neither the loss nor its sum is rounded, like torch's loss of float32 logits."""
    compare((logits(40, 999, dtype), targets(40, 999)), backend, dtype=F32, reduction=reduction)


@ON
@pytest.mark.parametrize("offset", [300.0, -1000.0, 1e5])
def test_logits_far_from_zero(backend, offset):
    for options in ("mean", "smoothed", "none"):
        args = logits(12, 1500, offset=offset), targets(12, 1500)
        compare(args, backend, **OPTIONS[options])


@ON
def test_rows_that_grow(backend):
    """Each block of a row has larger logits than the ones before."""
    x = logits(3, 5000) + torch.linspace(0, 400, 5000)
    compare((x, targets(3, 5000, ignored=False)), backend, reduction="none")
    compare((x.flip(1), targets(3, 5000, ignored=False)), backend, label_smoothing=0.1)


@ON
def test_sure_predictions(backend):
    """A loss near 0 stays accurate, because lse and the target's logit are not rounded."""
    x, target = logits(6, 50), targets(6, 50, ignored=False)
    x[torch.arange(6), target] = 25.0
    compare((x, target), backend, reduction="none")


@grid(ON, reduction=["mean", "sum", "none"], shape=[(0, 7), (0, 0)])
def test_empty(backend, reduction, shape):
    compare((torch.zeros(shape), targets(*shape)), backend, reduction=reduction)


@ON
@pytest.mark.parametrize("options", ["mean", "sum", "none", "all"])
def test_every_target_is_ignored(backend, options):
    x, target = logits(6, 41).requires_grad_(), torch.full((6,), -100)
    x, target = placed((x.detach(), target), device_of(backend))
    x.requires_grad_()
    for in_forward in (False, True):
        with fusedops.backend(backend), poisoned():
            loss = cross_entropy(x, target, grad_in_forward=in_forward, **OPTIONS[options])
            (grad,) = torch.autograd.grad(loss.sum(), x)
        expected = F.cross_entropy(x, target, reduction=OPTIONS[options].get("reduction", "mean"))
        torch.testing.assert_close(loss, expected, equal_nan=True)
        assert not grad.count_nonzero()


@ON
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_that_weigh_nothing(backend, smoothing):
    """Loss and gradient are NaN, like torch's, even if other classes have weights."""
    target = targets(6, 39)
    args = logits(6, 40), target, (torch.arange(40) == 39).float() * smoothing
    x, target, weight = placed(args, device_of(backend))
    for run in (F.cross_entropy, cross_entropy, cross_entropy_reference):
        leaf = x.clone().requires_grad_()
        with fusedops.backend(backend):
            loss = run(leaf, target, weight, label_smoothing=smoothing)
            (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.isnan() and grad[target != -100].isnan().all()


@ON
@pytest.mark.parametrize("in_forward", [False, True])
def test_a_scaled_float16_loss(backend, in_forward):
    """A GradScaler's factor comes before the gradient of a mean is rounded to float16, where that
    of so many rows is below the normal numbers."""
    rows, classes = (8, 200) if interpreted(backend) else (70000, 5)
    x, target = logits(rows, classes, torch.float16), targets(rows, classes)
    check(
        lambda x, t: cross_entropy(x, t, grad_in_forward=in_forward, dtype=F32) * 2**8,
        lambda x, t: cross_entropy_reference(x, t, dtype=F32) * 2**8,
        (x, target),
        backend,
    )


@ON
def test_another_ignore_index(backend):
    x, target = logits(9, 20), targets(9, 20, ignored=False)
    for index in (int(target[4]), -1, 7):
        target[2] = index
        compare((x, target), backend, ignore_index=index)


@grid(ON, create_graph=[False, True])
def test_ignored_rows_are_not_looked_at(backend, create_graph):
    x, target = logits(5, 300), targets(5, 300, ignored=False)
    x[2], target[2] = torch.nan, -100
    x, target = placed((x, target), device_of(backend))
    x.requires_grad_()
    with fusedops.backend(backend):
        loss = cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1)
        (grad,) = torch.autograd.grad(loss, x, create_graph=create_graph)
    keep = torch.tensor([0, 1, 3, 4], device=x.device)
    expected = cross_entropy_reference(x[keep], target[keep], label_smoothing=0.1, z_loss=0.1)
    torch.testing.assert_close(loss, expected)
    assert not grad[2].count_nonzero() and grad[keep].count_nonzero() == 4 * 300


@grid(
    ON,
    softcap=[None, 4.0],
    value=[torch.nan, torch.inf, -torch.inf],
    columns=[slice(3, 4), slice(0, 1024), slice(0, 1500), slice(1400, 1500)],
)
def test_nan_and_inf(backend, softcap, value, columns):
    """In some logits, in a whole block, and in a whole row."""
    x, target = logits(4, 1500), targets(4, 1500, ignored=False)
    target[0], target[1] = 3, 1450
    x[:2, columns] = value
    x, target = placed((x, target), device_of(backend))
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "softcap": softcap, "label_smoothing": smoothing}

        def run(function, options=options):
            leaf = x.clone().requires_grad_()
            loss = function(leaf, target, **options)
            return loss.detach(), *torch.autograd.grad(loss.sum(), leaf)

        with fusedops.backend(backend):
            actual = run(cross_entropy)
        torch.testing.assert_close(
            actual, run(cross_entropy_reference), equal_nan=True, rtol=1e-4, atol=1e-6
        )


@grid(ON, dtype=FLOATS, options=["mean", "sum", "none", "all"], only=runs)
def test_gradients_in_the_forward(backend, dtype, options):
    """They are rounded before scaling, so the loss's gradient here is a power of two."""
    x, target = placed((logits(11, 1500, dtype), targets(11, 1500)), device_of(backend))
    kwargs = OPTIONS[options]

    def run(function, x, cotangent, **more):
        leaf = x.clone().requires_grad_()
        loss = function(leaf, target, **kwargs, **more)
        again = torch.autograd.grad(loss, leaf, torch.ones_like(loss), retain_graph=True)
        return *again, *torch.autograd.grad(loss, leaf, torch.full_like(loss, cotangent))

    for cotangent in (1.0, 0.5):
        with fusedops.backend(backend), poisoned():
            actual = run(cross_entropy, x, cotangent, grad_in_forward=True)
        eager = run(cross_entropy_reference, x, cotangent)
        exact = run(cross_entropy_reference, x.double(), cotangent)
        for values in zip(actual, eager, exact, strict=True):
            assert yardstick(*values) is None


@ON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strides(backend, dtype):
    rows = logits(12, 600, dtype)
    for x in (
        rows[::2],
        rows[:, 3:500],
        rows[:, 1:],
        rows[:1].expand(6, -1),
        torch.cat([rows.flatten(), rows[0]])[1 : 1 + rows.numel()].view(12, 600),
    ):
        compare((x, targets(*x.shape)), backend)


@ON
def test_expanded_gradients(backend):
    x, target = placed((logits(8, 100), targets(8, 100)), device_of(backend))
    x.requires_grad_()
    with fusedops.backend(backend):
        loss = cross_entropy(x, target, reduction="none")
        actual = torch.autograd.grad(loss.sum(), x, retain_graph=True)
        expected = torch.autograd.grad(loss, x, torch.ones_like(loss))
    assert torch.equal(actual[0], expected[0])


@ON
def test_the_same_bits_each_time_and_whatever_the_threads(backend):
    rows = 12 if interpreted(backend) else 300
    x, target = placed((logits(rows, 1500), targets(rows, 1500)), device_of(backend))
    x.requires_grad_()

    def run(x, target, **options):
        with fusedops.backend(backend):
            loss = cross_entropy(x, target, **options)
            return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    for options in ({}, {"reduction": "none"}, {"grad_in_forward": True}):
        first, again = run(x, target, **options), run(x, target, **options)
        with threads(3):
            threaded = run(x, target, **options)
        assert all(map(torch.equal, first, again)) and all(map(torch.equal, first, threaded))
    whole = run(x, target, reduction="none")[0]
    with fusedops.backend(backend):
        alone = torch.cat(
            [cross_entropy(x[i : i + 1], target[i : i + 1], reduction="none") for i in range(rows)]
        )
    assert torch.equal(whole, alone)


def test_a_target_that_is_no_class():
    x = logits(5, 10)
    for wrong in (10, -1, 2**40):
        target = targets(5, 10, ignored=False)
        target[3] = wrong
        with pytest.raises(IndexError, match=f"class from 0 to 9 .* got {wrong} in row 3"):
            cross_entropy(x, target)
