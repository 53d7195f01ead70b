"""linear_log_probs matches its reference, TRL's functions and linear_cross_entropy."""

import pytest
import torch
from axes import grid

import fusedops
from benchmarks.harness.memory import profiled
from cross_entropy.cases import (
    BACKENDS,
    F32,
    FLOATS,
    PRODUCTS,
    head,
    runs,
    targets,
)
from fusedops.functional import linear_cross_entropy, linear_log_probs
from fusedops.references.cross_entropy import linear_log_probs_reference
from fusedops.testing import check, device_of, placed, poisoned, yardstick

SHAPES = [(1, 1, 1), (40, 33, 19), (40, 64, 1025), (1030, 16, 2100)]
MAPS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scaled": {"scale": 0.3, "temperature": 2.0},
    "capped": {"softcap": 5.0, "scale": 1.5, "temperature": 1.3},
}
WANTED = {"log_probs": (0,), "entropy": (1,), "both": (0, 1)}  # outputs with gradients
ON = pytest.mark.parametrize("backend", BACKENDS)


def outputs(run, which=(0, 1), order=None, **kwargs):
    """`run` as a function of tensors that returns these of its outputs."""
    order = slice(None) if order is None else order

    def called(x, w, t, b=None):
        x, w = x[..., order], w[..., order]
        result = run(x, w, t, linear_bias=b, return_entropy=1 in which, **kwargs)
        result = result if isinstance(result, tuple) else (result,)
        return tuple(result[i] for i in which)

    return called


def compare(args, backend, which=(0, 1), **kwargs):
    """args: input, linear_weight, targets and, if there is one, linear_bias."""
    reference = linear_log_probs_reference
    orders = (torch.randperm(args[0].shape[-1]).to(device_of(backend)) for _ in range(8))
    draws = (outputs(reference, which, order, **kwargs) for order in orders)
    ours = outputs(linear_log_probs, which, **kwargs)
    check(ours, outputs(reference, which, **kwargs), args, backend, draws)


@grid(ON, PRODUCTS, dtype=FLOATS, options=MAPS, shape=SHAPES, which=WANTED, only=runs)
def test_outputs_and_gradients(backend, dtype, options, shape, which, products):
    rows, _, classes = shape
    x, w, b = head(*shape, dtype)
    args = x, w, targets(rows, classes), b
    compare(args if options != "plain" else args[:3], backend, WANTED[which], **MAPS[options])


@grid(ON, PRODUCTS, dtype=FLOATS, shape=[(60, 40, 250)], only=runs)
def test_float32_outputs(backend, dtype, products, shape):
    x, w, _ = head(*shape, dtype)
    compare((x, w, targets(60, 250)), backend, dtype=F32)


@ON
def test_the_mean_logit_is_not_rounded(backend):
    """Rounding the mean to float32 moves it by 5e-5, and each gradient by p times that."""
    w = torch.arange(600).mul(7).remainder(601).sub(300).div(256).unsqueeze(1)
    args = torch.ones(1, 1), w, torch.tensor([5]), torch.full((600,), 1e4)  # exact logits
    x, w, target, b = placed(args, device_of(backend))

    def gradient(run, w, b):
        w = w.detach().requires_grad_()
        entropy = run(x.to(w), w, target, linear_bias=b, return_entropy=True)[1]
        return torch.autograd.grad(entropy.sum(), w)[0].double()

    with fusedops.backend(backend):
        actual = gradient(linear_log_probs, w, b)
    exact = gradient(linear_log_probs_reference, w.double(), b.double())
    torch.testing.assert_close(actual, exact, rtol=2e-5, atol=1e-8)


@grid(ON, shape=[(20, 16, 3000)], only=runs)
def test_logits_that_grow(backend, shape):
    """Each stripe has a new largest logit, far above the last one's."""
    x, w, _ = head(*shape)
    compare((x, w, targets(20, 3000), torch.linspace(-200, 200, 3000)), backend)


@ON
@pytest.mark.parametrize("shape", [(0, 5, 7), (6, 0, 7), (0, 5, 0)], ids=str)
def test_empty(backend, shape):
    x, w, b = head(*shape)
    compare((x, w, targets(shape[0], shape[2]), b), backend)


@ON
def test_dimensions_and_strides(backend):
    x, w, b = head(24, 16, 50)
    target = targets(24, 50)
    for shape in ((2, 3, 4), (1, 24)):
        compare((x.view(*shape, 16), w, target.view(shape), b), backend)
    compare((x[0], w, target[0], b), backend)
    for view in (
        (x.t().contiguous().t(), w.t().contiguous().t(), b),
        (x[:, :8], w[:, 8:], b[:1].expand(50)),
        (x[:1].expand(24, -1), w.repeat(2, 1)[::2], b.repeat(2)[::2]),
    ):
        compare((*view[:2], target, view[2]), backend)


def all_outputs(backend, x, w, target, b=None, **kwargs):
    x, w, target = placed((x, w, target), device_of(backend))
    b = None if b is None else b.to(device_of(backend))
    with fusedops.backend(backend), poisoned():
        kwargs = {"return_entropy": True, "return_top1": True} | kwargs
        return linear_log_probs(x, w, target, linear_bias=b, **kwargs)


@ON
def test_ignored_rows_are_zeros_and_not_looked_at(backend):
    x, w, _ = head(9, 12, 40)
    target = targets(9, 40, ignored=False)
    x[4], target[4] = torch.nan, 7
    log_probs, entropy, top1 = all_outputs(backend, x, w, target, ignore_index=7)
    gone = target == 7
    assert not log_probs[gone].any() and not entropy[gone].any() and not top1[gone].any()
    assert log_probs[~gone].isfinite().all() and (log_probs[~gone] < 0).all()
    x, w, target = placed((x, w, target), device_of(backend))
    x.requires_grad_()
    with fusedops.backend(backend), poisoned():
        both = linear_log_probs(x, w, target, ignore_index=7, return_entropy=True)
        (grad,) = torch.autograd.grad(sum(o.sum() for o in both), x)
    assert not grad[gone].count_nonzero() and grad[~gone].isfinite().all()
    everything = torch.full((9,), 7)
    assert not any(o.count_nonzero() for o in all_outputs(backend, x.detach(), w, everything,
                                                          ignore_index=7))  # fmt: skip


@grid(
    ON,
    PRODUCTS,
    dtype=FLOATS,
    options=["plain", "temperature", "scaled"],
    shape=[(40, 33, 19), (30, 64, 1025), (50, 16, 2100)],
    only=runs,
)
def test_top1(backend, dtype, options, shape, products):
    """Half of the targets are the logits' argmax. Equal logits: the first class."""
    rows, _, classes = shape
    x, w, _ = head(*shape, F32)
    x, w = (t.mul(4).round().clamp(-8, 8).to(dtype) for t in (x, w))  # exact sums: every tie is one
    target = (x.float() @ w.float().t()).argmax(1)
    target[::2] = targets(rows, classes, ignored=False)[::2]
    _, _, top1 = all_outputs(backend, x, w, target, **MAPS[options])
    reference = linear_log_probs_reference(x, w, target, return_top1=True, dtype=F32)[2]
    assert top1.dtype == torch.bool and torch.equal(top1.cpu(), reference)
    assert top1.any() and not top1.all()
    alone = all_outputs(backend, x, w, target, return_entropy=False, **MAPS[options])[1]
    assert torch.equal(alone, top1)


@ON
def test_the_first_of_equal_classes_is_the_top_one(backend):
    """In one tile, in one block of a tile, across tiles, and alone in a later block."""
    x = torch.ones(1, 1)
    cases = (3, (0, 2)), (1500, (3, 1300)), (5000, (2, 40, 1023, 4097)), (5000, (1030,))
    for classes, equal in cases:
        w = torch.zeros(classes, 1)
        w[list(equal)] = 2.0
        is_top1 = [
            all_outputs(backend, x, w, torch.tensor([c]))[2].item()
            for c in (*equal, 1, classes - 1)
        ]
        assert is_top1 == [True] + [False] * (len(is_top1) - 1)


@ON
def test_nan_and_inf(backend):
    x, w, b = torch.ones(4, 1), torch.linspace(0, 1, 50).unsqueeze(1), torch.zeros(50)
    target = torch.tensor([49, 3, 0, 20])
    x[1] = torch.nan
    log_probs, entropy, top1 = all_outputs(backend, x, w, target)
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False, False]
    assert top1.tolist() == [True, False, False, False]
    for place, bad in ((0, torch.nan), (10, torch.nan), (48, torch.nan), (49, torch.inf)):
        some = b.index_fill(0, torch.tensor(place), bad)  # beside the top class, or it
        outputs = all_outputs(backend, x, w, torch.full((4,), 49), some)
        assert outputs[0].isnan().all() and outputs[1].isnan().all() and not outputs[2].any()
    b[30:] = -torch.inf  # classes that are masked
    log_probs, entropy, _ = all_outputs(backend, x, w, target, b)
    unmasked = all_outputs(backend, x, w[:30], target.clamp(max=29))
    assert log_probs[0] == -torch.inf and torch.equal(log_probs[2:], unmasked[0][2:])
    torch.testing.assert_close(entropy, unmasked[1], equal_nan=True)
    leaves = [t.requires_grad_() for t in placed((x[2:], w, b), device_of(backend))]
    with fusedops.backend(backend):
        outputs = linear_log_probs(
            *leaves[:2], target[2:].to(leaves[0].device), linear_bias=leaves[2],
            return_entropy=True,
        )  # fmt: skip
        grads = torch.autograd.grad(sum(o.sum() for o in outputs), leaves)
    assert all(g.isfinite().all() for g in grads) and not grads[2][30:].any()
    _, _, top1 = all_outputs(backend, x, w * 0 - torch.inf, target)
    assert not top1.any()


@grid(ON, dtype=[F32, torch.bfloat16], only=runs)
def test_as_linear_cross_entropy(backend, dtype):
    """On CPUs the same bits, if nothing else is asked for."""
    x, w, b = head(40, 16, 300, dtype)
    x, w, b, target = placed((x, w, b, targets(40, 300)), device_of(backend))
    kwargs = {"linear_bias": b, "softcap": 5.0}
    with fusedops.backend(backend):
        log_probs = linear_log_probs(x, w, target, **kwargs)
        loss = linear_cross_entropy(x, w, target, reduction="none", **kwargs)
    if backend == "cpu":
        assert torch.equal(log_probs, -loss)
    torch.testing.assert_close(log_probs, -loss)


def test_the_backward_takes_one_gradient_or_both():
    x, w, _ = head(20, 16, 300)
    leaves, target = [x.requires_grad_(), w.requires_grad_()], targets(20, 300)
    log_probs, entropy = linear_log_probs(x, w, target, return_entropy=True)
    first = torch.autograd.grad(log_probs.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(entropy.sum(), leaves, retain_graph=True)
    both = torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)
    for log_probs_grad, entropy_grad, total in zip(first, second, both, strict=True):
        torch.testing.assert_close(log_probs_grad + entropy_grad, total)
    assert not linear_log_probs(x, w, target, return_top1=True)[1].requires_grad


def test_a_frozen_weight():
    x, w, b = head(300, 40, 1500)
    target = targets(300, 1500)

    def of(run, *leaves):
        x, b = (t.clone().requires_grad_() for t in leaves)
        outputs = run(x, w.to(x.dtype), target, linear_bias=b, return_entropy=True)
        return torch.autograd.grad(sum(o.sum() for o in outputs[:2]), (x, b))

    actual = of(linear_log_probs, x, b)
    eager = of(linear_log_probs_reference, x, b)
    exact = of(linear_log_probs_reference, x.double(), b.double())
    for values in zip(actual, eager, exact, strict=True):
        assert yardstick(*values) is None


def test_autocast():
    x, w, b = head(20, 16, 50)
    target = targets(20, 50)
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_log_probs(x, w, target, linear_bias=b, return_entropy=True)
    low = (t.bfloat16() for t in (x, w))
    expected = linear_log_probs(
        *low, target, linear_bias=b.bfloat16(), return_entropy=True, dtype=F32
    )
    assert all(o.dtype == F32 for o in actual) and all(map(torch.equal, actual, expected))


def test_wrong_numbers():
    x, w, _ = head(5, 4, 10)
    for name in ("temperature", "softcap"):
        for value in (0.0, -1.0, torch.inf, torch.nan):
            with pytest.raises(ValueError, match=f"linear_log_probs: {name} must be above 0"):
                linear_log_probs(x, w, targets(5, 10), **{name: value})
    target = targets(5, 10, ignored=False)
    target[3] = 10
    with pytest.raises(IndexError, match=r"linear_log_probs: target .* 0 to 9 .* got 10 in row 3"):
        linear_log_probs(x, w, target)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_the_logits_never_exist(dtype):
    """Scratch memory is at most a quarter of the float32 logits, forward and backward."""
    x, w, _ = head(2048, 8, 4096, dtype)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    target = targets(2048, 4096)

    def run():
        outputs = linear_log_probs(x, w, target, return_entropy=True, return_top1=True)
        return torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves)

    memory = profiled(run)
    assert memory.peak - memory.results < 2048 * 4096 * 4 / 4


# TRL's own helpers.


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_as_trls_fused_head():
    """Its outputs and gradients, with all options at once."""
    theirs = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    x, w, b = head(24, 16, 300)
    target = (x @ w.t()).add(b).argmax(1)
    target[::2] = targets(24, 300, ignored=False)[::2]
    leaves = [t.requires_grad_() for t in (x, w, b)]
    options = 0.8, 128, 5.0, 0.5, ("log_probs", "entropy", "is_top1")
    log_probs, entropy, *_, is_top1 = theirs.apply(*leaves, target, *options)
    actual = linear_log_probs(
        x, w, target, linear_bias=b, temperature=0.8, softcap=5.0, scale=0.5,
        return_entropy=True, return_top1=True,
    )  # fmt: skip
    assert torch.equal(actual[2], is_top1) and 0 < is_top1.sum() < 24
    torch.testing.assert_close(actual[:2], (log_probs, entropy))
    cotangents = [torch.randn_like(log_probs) for _ in range(2)]
    torch.testing.assert_close(
        torch.autograd.grad(actual[:2], leaves, cotangents),
        torch.autograd.grad((log_probs, entropy), leaves, cotangents),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_minus_100_is_no_class_where_another_index_is_ignored(dtype):
    x, w = torch.randn(2, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype)
    with pytest.raises(IndexError, match="-100"):
        linear_log_probs(x, w, torch.tensor([1, -100]), ignore_index=5)
    ignored = linear_log_probs(x, w, torch.tensor([1, 5]), ignore_index=5)
    assert ignored[0] < 0 and ignored[1] == 0
