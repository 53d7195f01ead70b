"""cross_entropy and linear_cross_entropy match torch's functions, modules and autocast dtypes."""

import pytest
import torch
import torch.nn.functional as F
from axes import grid
from torch import nn

import fusedops
from cross_entropy.cases import FLOATS, class_weight, head, logits, targets
from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.references.cross_entropy import cross_entropy_reference
from fusedops.testing import gradients

F64 = torch.float64


@grid(
    reduction=["mean", "sum", "none"],
    smoothing=[0.0, 0.2],
    shape=[(7,), (5, 7), (5, 7, 3), (2, 7, 3, 4), (0, 7, 2), (5, 7, 0)],
)
def test_as_torch(reduction, smoothing, shape):
    """Of any dimensions, with the classes side by side and not."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draw)
    where = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, 7, where, generator=draw)
    if target.numel() > 4:
        target.view(-1)[1] = -100
    options = {"weight": class_weight(7), "reduction": reduction, "label_smoothing": smoothing}
    views = [x]
    if len(shape) > 2:
        views.append(x.movedim(1, -1).contiguous().movedim(-1, 1))
    for view in views:
        actual = gradients(lambda x: cross_entropy(x, target, **options), (view,))
        expected = gradients(lambda x: F.cross_entropy(x, target, **options), (view,))
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (5, 7, 3)], ids=str)
def test_probabilities(shape):
    """And their gradient."""
    x = torch.randn(shape)
    p = torch.randn(shape).softmax(min(1, len(shape) - 1))
    for options in ({}, {"reduction": "none"}, {"weight": class_weight(7), "label_smoothing": 0.2}):
        actual = gradients(lambda x, p, options=options: cross_entropy(x, p, **options), (x, p))
        expected = gradients(lambda x, p, options=options: F.cross_entropy(x, p, **options), (x, p))
        torch.testing.assert_close(actual, expected)
    options = {"z_loss": 0.1, "softcap": 2.0, "scale": 0.5}
    for reduction, reduce in (("mean", torch.mean), ("sum", torch.sum), ("none", torch.clone)):

        def loss_with_squares(x, p, reduce=reduce):
            z = 2 * torch.tanh(x / 4)
            squares = 0.1 * torch.logsumexp(z, min(1, x.dim() - 1)) ** 2
            return reduce(F.cross_entropy(z, p, reduction="none") + squares)

        def ours(x, p, reduction=reduction):
            return cross_entropy(x, p, reduction=reduction, **options)

        actual, expected = (gradients(run, (x, p)) for run in (ours, loss_with_squares))
        torch.testing.assert_close(actual, expected)


def test_old_arguments_and_dtypes_of_targets():
    x, target = logits(5, 7), targets(5, 7, ignored=False)
    with pytest.warns(UserWarning, match="size_average and reduce"):
        actual = cross_entropy(x, target, None, False)
    torch.testing.assert_close(actual, F.cross_entropy(x, target, reduction="sum"))
    torch.testing.assert_close(cross_entropy(x, target.byte()), F.cross_entropy(x, target))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
@grid(
    reduction=["mean", "sum", "none"],
    classes=[(7,), (7, 3), (7, 2, 2)],
    probabilities=[False, True],
)
def test_as_torchs_linear_cross_entropy(reduction, classes, probabilities):
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=draw) for s in ((5, 4), (*classes, 4)))
    b = torch.randn(classes, generator=draw)
    if probabilities:
        target = torch.randn((5, *classes), generator=draw).softmax(1)
    else:
        target = torch.randint(0, 7, (5, *classes[1:]), generator=draw)
    options = {"weight": class_weight(7), "reduction": reduction, "label_smoothing": 0.1}
    for more in ((x, w), (x, w, b)):

        def of(run):
            return lambda x, w, b=None: run(x, w, target, linear_bias=b, **options)

        actual, expected = (
            gradients(of(f), more) for f in (linear_cross_entropy, F.linear_cross_entropy)
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("in_forward", [False, True], ids=["", "made in the forward"])
def test_modules(in_forward):
    x, w, b = head(12, 6, 20)
    target, weight = targets(12, 20), class_weight(20)
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "sum", "ignore_index": -7}
    target[3] = -7
    target[target == -100] = -7
    ours = fusedops.nn.CrossEntropyLoss(**options, grad_in_forward=in_forward)
    theirs = nn.CrossEntropyLoss(**options)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    z = F.linear(x, w, b)
    torch.testing.assert_close(ours(z, target), theirs(z, target))
    capped = fusedops.nn.CrossEntropyLoss(softcap=2.0, scale=0.5, z_loss=0.1, dtype=torch.float32)
    expected = cross_entropy_reference(z, targets(12, 20), softcap=2.0, scale=0.5, z_loss=0.1)
    torch.testing.assert_close(
        capped(z.bfloat16(), targets(12, 20)), expected, rtol=0.01, atol=0.01
    )


@grid(out_features=[(), (3,)], bias=[False, True])
def test_linear_module(out_features, bias):
    options = {"bias": bias, "weight": class_weight(20), "label_smoothing": 0.1}
    ours = fusedops.nn.LinearCrossEntropyLoss(6, 20, out_features=out_features, **options)
    x, target = torch.randn(12, 6), torch.randint(0, 20, (12, *out_features))
    z = F.linear(x, ours.linear.weight, ours.linear.bias).view(12, 20, *out_features)
    expected = F.cross_entropy(z, target, ours.weight, label_smoothing=0.1)
    torch.testing.assert_close(ours(x, target), expected)
    assert set(ours.state_dict()) == {"weight", "linear.weight"} | (
        {"linear.bias"} if bias else set()
    )
    if hasattr(nn, "LinearCrossEntropyLoss"):
        theirs = nn.LinearCrossEntropyLoss(6, 20, out_features=out_features, **options)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(theirs(x, target), expected)


def test_linear_module_errors():
    with pytest.raises(RuntimeError, match=r"weight must be \[5\], .* got \[4\]"):
        fusedops.nn.LinearCrossEntropyLoss(3, 5, weight=torch.ones(4))
    with pytest.raises(RuntimeError, match=r"label_smoothing must be .*, got 1\.5"):
        fusedops.nn.LinearCrossEntropyLoss(3, 5, label_smoothing=1.5)


OPS = pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_probabilities_of_more_dimensions(reduction):
    """The classes are the last, as linear_weight's rows are."""
    x, w, _ = head(6, 5, 9)
    target = torch.rand(6, 9)
    expected = F.cross_entropy(F.linear(x, w), target, reduction=reduction)
    actual = linear_cross_entropy(x.view(2, 3, 5), w, target.view(2, 3, 9), reduction=reduction)
    torch.testing.assert_close(actual.flatten(), expected.flatten())


def test_batched_gradients_that_the_forward_has_made():
    x = logits(6, 9).requires_grad_()
    loss, cotangents = cross_entropy(x, targets(6, 9), grad_in_forward=True), torch.randn(3)
    each = [
        torch.autograd.grad(loss, x, cotangent, retain_graph=True)[0] for cotangent in cotangents
    ]
    (batched,) = torch.autograd.grad(loss, x, cotangents, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack(each))


def test_no_double_backward_of_gradients_from_the_forward():
    x = logits(4, 5).requires_grad_()
    loss = cross_entropy(x, targets(4, 5), grad_in_forward=True)
    with pytest.raises(RuntimeError, match=r"grad_in_forward=True .* no double backward"):
        torch.autograd.grad(loss, x, create_graph=True)


@OPS
def test_a_class_weight_has_no_gradient(op):
    """As torch's."""
    x, w, _ = head(6, 5, 9)
    weight, target = class_weight(9).requires_grad_(), targets(6, 9)
    with pytest.raises(RuntimeError, match=r"not differentiable .* 'weight'"):
        if op == "cross_entropy":
            cross_entropy(F.linear(x, w), target, weight)
        else:
            linear_cross_entropy(x, w, target, weight=weight)


@grid(
    options=[{}, {"label_smoothing": 0.1, "reduction": "sum"}, {"weight": class_weight(9, F64)}],
    probabilities=[False, True],
)
def test_float64_equals_torchs_bit_for_bit(options, probabilities):
    x = logits(6, 9, F64).requires_grad_()
    target = torch.rand(6, 9, dtype=F64).softmax(1) if probabilities else targets(6, 9)
    results = []
    for run in (cross_entropy, F.cross_entropy):
        loss = run(x, target, **options)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        results.append((loss, first, *torch.autograd.grad(first.square().sum(), x)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_kernel_operators_take_float64():
    """No public operator gives them any."""
    operators, target = torch.ops.fusedops, targets(6, 9)
    options = -100, 1, [0.0, 0.0, 1.0, 0.0], F64
    z = logits(6, 9, F64)
    loss, lse, total, dinput = operators.cross_entropy_forward(z, target, None, *options, True)
    torch.testing.assert_close(loss, F.cross_entropy(z, target))
    torch.testing.assert_close((lse, total), (torch.logsumexp(z, 1), (target >= 0).sum().double()))
    grad = operators.cross_entropy_backward(loss, z, target, None, lse, total, *options[:3])
    x, w, b = head(6, 5, 9, F64)
    loss, *_ = operators.linear_cross_entropy_forward(x, w, target, b, None, *options, [False] * 3)
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.T + b, target))
    z.requires_grad_()
    loss = F.cross_entropy(z, target)
    expected = torch.autograd.grad(loss, z)[0]
    torch.testing.assert_close((dinput, grad), (expected, expected * loss.detach()))


def test_kernel_operators_of_log_probs_take_float64():
    (x, w, b), target = head(6, 5, 9, F64), targets(6, 9)
    options = -100, [0.5, 3.0], F64, [True, True]
    log_probs, entropy, top1, lse, mean = torch.ops.fusedops.linear_log_probs_forward(
        x, w, target, b, *options
    )
    z = 3 * torch.tanh(F.linear(x, w, b) / 6)
    log_p, live = z.log_softmax(1), target >= 0
    expected = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    torch.testing.assert_close((log_probs, entropy), tuple(t * live for t in expected))
    assert torch.equal(top1, z.argmax(1) == target)
    sums = torch.logsumexp(z, 1), (log_p.exp() * z).sum(1)
    torch.testing.assert_close((lse[live], mean[live]), tuple(t[live] for t in sums))


@pytest.mark.parametrize("in_forward", [False, True], ids=["", "made in the forward"])
def test_compile_of_a_float32_loss(in_forward):
    def loss(z, target):
        return cross_entropy(z * 2, target, grad_in_forward=in_forward, dtype=torch.float32)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        args = logits(rows, 9, torch.bfloat16), targets(rows, 9)
        actual, expected = (gradients(run, args) for run in (compiled, loss))
        torch.testing.assert_close(actual, expected)


@grid(dtype=FLOATS, device=["cpu", "cuda"])
def test_autocast_as_torch(dtype, device):
    """The loss is float32, as torch's; the product in autocast's dtype."""
    x, w, b = head(30, 16, 40, dtype)
    target = targets(30, 40)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.bfloat16):
        actual = cross_entropy(logits(30, 40, dtype), target)
        expected = F.cross_entropy(logits(30, 40, dtype), target)
        assert actual.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        actual = linear_cross_entropy(x, w, target, linear_bias=b)
        expected = F.cross_entropy(F.linear(x, w, b), target)
        assert actual.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    grads = torch.autograd.grad(actual, leaves)
    assert [g.dtype for g in grads] == [dtype] * 3


def test_changed_logits_are_noticed():
    leaf = logits(4, 5).requires_grad_()
    x = leaf * 1
    loss = cross_entropy(x, targets(4, 5))
    early_loss = cross_entropy(x, targets(4, 5), grad_in_forward=True)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.autograd.grad(early_loss, leaf)[0].isfinite().all()  # which keeps no logits
