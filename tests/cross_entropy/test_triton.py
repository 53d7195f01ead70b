"""Cross-entropy's Triton kernels: bad targets, tile sizes, class blocks, no synchronization."""

import pytest
import torch
from axes import grid
from contract.family import FAMILIES

import fusedops
from cross_entropy.cases import class_weight, head, logits, targets
from fusedops.functional import cross_entropy, linear_cross_entropy, linear_log_probs
from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
    linear_log_probs_reference,
)
from fusedops.testing import backends, check, device_of, placed, poisoned

if "triton" not in backends("cross_entropy"):
    pytest.skip("Triton cannot run here", allow_module_level=True)

from fusedops.triton.cross_entropy import linear
from fusedops.triton.cross_entropy.tile import tile_of

DEVICE = device_of("triton")
F32, F16, F64 = torch.float32, torch.float16, torch.float64
MEAN = 1  # a reduction
HOW = [0.1, 0.02, 2.0, 5.0]  # label_smoothing, z_loss, scale, softcap
KERNELS = FAMILIES["cross_entropy"].kernels
OP = torch.ops.fusedops


def on_device(*tensors):
    return placed(tensors, DEVICE)


@pytest.fixture
def small_tiles(monkeypatch):
    """Sets tiles of 16 rows or classes."""
    monkeypatch.setattr(linear, "tile_size", lambda device: 1)
    monkeypatch.setattr(linear, "LEAST", 16)


def kernel_calls(variant):
    """Calls of the kernels' own operators; a forward also with a float32 loss of 16-bit logits."""
    for name, args in KERNELS[variant](DEVICE):
        yield name, args
        if name.endswith("_forward"):
            yield name, tuple(F32 if isinstance(a, torch.dtype) else a for a in args)


def facts(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [None if t is None else (t.shape, t.dtype, t.stride()) for t in outputs]


@grid(variant=KERNELS)
def test_outputs_are_those_of_the_meta_kernels(variant):
    for name, args in kernel_calls(variant):
        with fusedops.backend("triton"):
            outputs = getattr(OP, name)(*args)
        on_meta = (a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)
        assert facts(outputs) == facts(getattr(OP, name)(*on_meta)), name


@grid(weighted=[False, True], smoothing=[0.0, 0.1])
def test_a_target_that_is_no_class(weighted, smoothing, small_tiles):
    """Only its row becomes NaN."""
    rows, classes = 7, 40
    wrong, right = [0, 2, 3, 5], [1, 4, 6]
    x, target = logits(rows, classes), targets(rows, classes, ignored=False)
    target[wrong] = torch.tensor([classes, -1, 2**40 + 5, -(2**33)])
    x, target, w, b = on_device(x, target, torch.eye(classes), torch.zeros(classes))
    options = {"label_smoothing": smoothing, "z_loss": 0.1}
    options["weight"] = class_weight(classes).to(DEVICE) if weighted else None
    for run in (
        lambda x, **options: cross_entropy(x, target, **options),
        lambda x, **options: cross_entropy(x, target, grad_in_forward=True, **options),
        lambda x, **options: linear_cross_entropy(x, w, target, linear_bias=b, **options),
    ):
        for reduction in ("none", "sum", "mean"):
            leaf = x.clone().requires_grad_()
            with fusedops.backend("triton"), poisoned():
                loss = run(leaf, reduction=reduction, **options)
                (grad,) = torch.autograd.grad(loss.sum(), leaf)
            if reduction == "none":
                assert loss[wrong].isnan().all() and loss[right].isfinite().all()
            else:
                assert loss.isnan()
            assert grad[wrong].isnan().all() and grad[right].isfinite().all()
            expected = torch.autograd.grad(
                cross_entropy_reference(
                    leaf[right], target[right], reduction=reduction, **options
                ).sum(),
                leaf,
            )
            torch.testing.assert_close(grad[right], expected[0][right])


def test_offsets_past_32_bits():
    apart = 2**31
    memory = torch.empty(apart + 40, dtype=F16, device=DEVICE)  # of which two rows are touched
    x = memory.as_strided((2, 33), (apart, 1))
    x.copy_(logits(2, 33, F16))
    target = targets(2, 33).to(DEVICE)
    with fusedops.backend("triton"):
        actual = loss_and_gradient(x, target)
        expected = loss_and_gradient(x.clone(), target)
    assert all(map(torch.equal, actual, expected))


def loss_and_gradient(x, target, **options):
    leaf = x.detach().requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none", **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaf)


@grid(classes=[1, 31, 1024, 32000, 131072 + 3], dtype=[F32, F16], in_fwd=[False, True])
def test_tiles(classes, dtype, in_fwd):
    args = logits(2, classes, dtype), targets(2, classes)
    kwargs = {"reduction": "sum", "grad_in_forward": in_fwd}
    for more in ({}, {"label_smoothing": 0.1, "softcap": 20.0}):
        check(
            of(cross_entropy, **kwargs, **more),
            of(cross_entropy_reference, **kwargs, **more),
            args,
            "triton",
        )


def of(run, weight=None, **options):
    """weight follows the logits into float64, and has no gradient."""

    def called(x, *args):
        w = weight if weight is None or x.dtype != F64 else weight.double()
        return run(x, *args, weight=w, **options)

    return called


def test_a_tile_covers_a_row_with_the_fewest_warps():
    warps = {n: tile_of(n, 2, 256)["num_warps"] for n in (1, 1024, 1025, 8192, 300000)}
    assert warps == {1: 1, 1024: 1, 1025: 2, 8192: 8, 300000: 8}
    for n, size in ((7, 2), (5000, 4), (300000, 2)):
        tile = tile_of(n, size, 512)
        assert tile["VECTOR"] * size == 16 and tile["LANES"] == 32 * tile["num_warps"]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_parts_of_a_row(dtype):
    """Rows begin and end anywhere in a vector; their neighbours must not change."""
    for n in (1, 6, 9, 30):
        for first in range(0, 9, 2):
            whole = logits(5, 40 + n % 2, dtype)
            weight = class_weight(n)
            args = whole[:, first : first + n], targets(5, n)
            kwargs = {"weight": weight, "label_smoothing": 0.2, "reduction": "none"}
            check(
                of(cross_entropy, **kwargs), of(cross_entropy_reference, **kwargs), args, "triton"
            )


def test_a_softcap_far_above_the_logits():
    """tanh stays accurate for small numbers."""
    args = logits(4, 5) / 100, targets(4, 5, ignored=False)
    kwargs = {"softcap": 50.0, "reduction": "none"}
    check(of(cross_entropy, **kwargs), of(cross_entropy_reference, **kwargs), args, "triton")


def test_logits_of_the_least_float():
    """It may mask a row, or a thread's columns, like -inf."""
    least = torch.finfo(F32).min
    x, target = on_device(logits(3, 3000), torch.tensor([2, 2, 2900]))
    x[0], x[1, :2500], x[2, :2500] = least, least, -torch.inf
    with fusedops.backend("triton"):
        actual = loss_and_gradient(x, target)
    expected = cross_entropy_reference(x, target, reduction="none")
    torch.testing.assert_close(actual[0], expected)
    assert actual[1].isfinite().all()


STRIPES = {
    "none": {"reduction": "none"},
    "all": {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0},
}


@grid(dtype=[F32, F16], options=STRIPES, last=[40, -40])
def test_stripes_of_classes(dtype, options, last, small_tiles):
    """Forward and backward over three stripes, one of them ragged, with targets in each. Each has
    larger logits than the one before, or smaller ones."""
    x, w, b = head(6, 20, 40, dtype)
    b = b + torch.linspace(0, last, 40).to(dtype)
    target = torch.tensor([3, 15, 16, -100, 31, 39])
    kwargs = STRIPES[options] | {"weight": class_weight(40) if options == "all" else None}

    def with_bias(run):
        return lambda x, w, t, b: of(run, linear_bias=b, **kwargs)(x, w, t)

    pair = with_bias(linear_cross_entropy), with_bias(linear_cross_entropy_reference)
    check(*pair, (x, w, target, b), "triton")


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_whole_rows(dtype, small_tiles):
    """Gradients from the forward, over three tiles of rows, equal the backward's."""
    rows, classes = 35, 19
    x, w, b = on_device(*head(rows, 8, classes, dtype))
    (target,) = on_device(targets(rows, classes))
    args, options = (x, w, target, b, None), (-100, MEAN, HOW)
    with fusedops.backend("triton"), poisoned():
        forward = OP.linear_cross_entropy_forward
        loss, lse, total, *grads = forward(*args, *options, F32, [True] * 3)
        plain = forward(*args, *options, F32, [False] * 3)
        grad = torch.ones((), device=DEVICE)
        later = OP.linear_cross_entropy_backward(grad, *args, lse, total, *options, [True] * 3)
    assert torch.equal(total, (target != -100).sum().double())
    torch.testing.assert_close((loss, lse, *grads), (*plain[:2], *later))


def test_no_classes():
    x, w = on_device(torch.ones(3, 4), torch.ones(0, 4))
    x.requires_grad_()
    with fusedops.backend("triton"), poisoned():
        loss = linear_cross_entropy(x, w, torch.full((3,), -100).to(DEVICE), reduction="none")
        (grad,) = torch.autograd.grad(loss.sum(), x)
    assert not loss.count_nonzero() and not grad.count_nonzero()


@grid(dtype=[F32, F16], softcap=[None, 5.0], last=[40, -40])
def test_stripes_of_log_probs(dtype, softcap, last, small_tiles):
    """Three stripes, as above: gradients of log-probabilities and entropies, and the top class."""
    x, w, b = head(6, 20, 40, dtype)
    b = b + torch.linspace(0, last, 40).to(dtype)
    target = torch.tensor([3, 15, 16, -100, 31, 39])

    def numbers(run):
        options = {"softcap": softcap, "return_entropy": True}
        return lambda x, w, t, b: run(x, w, t, linear_bias=b, **options)[:2]

    pair = numbers(linear_log_probs), numbers(linear_log_probs_reference)
    check(*pair, (x, w, target, b), "triton")
    x, w = (t.mul(4).round().clamp(-8, 8) for t in (x, w))  # exact sums
    target = (x @ w.t()).argmax(1)
    target[1] = (target[1] + 17) % 40
    x, w, target = on_device(x, w, target)
    with fusedops.backend("triton"):
        _, top1 = linear_log_probs(x, w, target, return_top1=True)
    assert top1.tolist() == [True, False, True, True, True, True]


def test_the_first_of_equal_classes_in_two_stripes(small_tiles):
    w = torch.zeros(40, 1)
    w[[3, 20]] = 2.0
    x, w, target = on_device(torch.ones(3, 1), w, torch.tensor([3, 20, 1]))
    with fusedops.backend("triton"):
        _, top1 = linear_log_probs(x, w, target, return_top1=True)
    assert top1.tolist() == [True, False, False]


@grid(masked=[-torch.inf, torch.finfo(F32).min], live=[slice(33, 40), slice(3, 9)])
def test_masked_stripes_of_log_probs(masked, live, small_tiles):
    """The first two stripes, or the last two, have masked classes only."""
    x, w, _ = head(4, 20, 40, F32)
    b = torch.full((40,), masked)
    b[live] = 0
    args = on_device(x, w, b)
    target = torch.tensor([live.start, live.stop - 1, -100, live.start + 1], device=DEVICE)

    def outputs(run):
        leaves = [t.detach().clone().requires_grad_() for t in args]
        *numbers, top1 = run(
            *leaves[:2], target, linear_bias=leaves[2], return_entropy=True, return_top1=True
        )
        return *numbers, top1, *torch.autograd.grad(sum(n.sum() for n in numbers), leaves)

    with fusedops.backend("triton"), poisoned():
        actual = outputs(linear_log_probs)
    for ours, expected in zip(actual, outputs(linear_log_probs_reference), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, expected)


def test_log_probs_of_a_target_that_is_no_class(small_tiles):
    """Only its row becomes NaN."""
    x, w, target, b = on_device(*head(4, 8, 40)[:2], targets(4, 40, ignored=False), torch.ones(40))
    target[1], target[2] = 40, -1
    with fusedops.backend("triton"):
        log_probs = linear_log_probs(x, w, target, linear_bias=b)
    assert log_probs.isnan().tolist() == [False, True, True, False]


# What the weight is, and its products in the forward and in the backward.
HEADS = {
    (F32, "trained"): (3, 0),
    (torch.bfloat16, "frozen"): (2, 0),
    (F16, "trained"): (1, 3),  # a forward's float16 gradients would underflow
    (torch.bfloat16, "trained"): (1, 3),  # their sum would be as large as the float32 weight
}


@pytest.mark.parametrize("head_of", HEADS, ids=str)
def test_products_of_a_head(head_of, monkeypatch, small_tiles):
    """Each makes the logits, dinput or dweight once. Only a 16-bit backward repeats the logits'."""
    (dtype, weight), (forward, backward) = head_of, HEADS[head_of]
    rows, features, classes = 40, 8, 50
    x, w, _ = on_device(*head(rows, features, classes, dtype))
    leaves = [x.requires_grad_(), w.requires_grad_(weight == "trained")]
    product, sizes = linear.product, []

    def counted(a, b, out, add=False):
        sizes.append(a.shape[0] * a.shape[1] * b.shape[1])
        product(a, b, out, add)

    monkeypatch.setattr(linear, "product", counted)
    each = rows * features * classes
    with fusedops.backend("triton"):
        loss = linear_cross_entropy(x, w, targets(rows, classes).to(DEVICE))
        assert sum(sizes) == forward * each
        torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])
    assert sum(sizes) == (forward + backward) * each
