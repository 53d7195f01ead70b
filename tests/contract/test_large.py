"""Tensors with more than 2^31 elements: AdamW, clipping and cross entropy.

Memory that a test does not touch costs nothing. Tests that touch all of a large tensor run in
`make large` (FUSEDOPS_LARGE_TESTS=1), one at a time: each takes up to 13 GiB.
"""

import gc
import os
import resource
from dataclasses import replace

import pytest
import torch
from adamw.cases import check as check_step
from adamw.cases import step_of
from axes import grid

import fusedops
from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.optim import AdamW8bit
from fusedops.references.adamw import BLOCK, KINDS, NEAREST, STOCHASTIC
from fusedops.references.cross_entropy import cross_entropy_reference
from fusedops.testing import backends, check, device_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LARGE = pytest.mark.skipif(
    os.environ.get("FUSEDOPS_LARGE_TESTS") != "1", reason="FUSEDOPS_LARGE_TESTS=1 runs it"
)
ON_CPU = [name for name in backends("cross_entropy") if device_of(name).type == "cpu"]


def grown(before):
    """GiB by which the process has grown at most since a number of KiB."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def filled(shape, dtype, seed):
    """Random numbers that repeat, with a period that is no power of two."""
    t = torch.empty(shape, dtype=dtype)
    period = torch.randn((1 << 22) - 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for part in t.view(-1).split(period.numel()):
        part.copy_(period[: part.numel()])
    return t


def losses_and_gradients(run, *inputs):
    """Of every row, and the inputs' gradients."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    losses = run(*inputs)
    return losses.detach(), *torch.autograd.grad(losses, inputs, torch.ones_like(losses))


# Strides of [4, 3000] logits whose last element is beyond 2^31 and whose strides are below it.
STRIDES = {"far rows": (2**30, 1), "far classes": (1, 2**20)}


@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_cross_entropy_of_logits_far_apart(backend, strides):
    before = peak()
    draw = torch.Generator().manual_seed(0)
    near = torch.randn(4, 3000, generator=draw).to(F16)
    size = 1 + sum(stride * (n - 1) for stride, n in zip(strides, near.shape, strict=True))
    assert size > 2**31
    far = torch.empty(size, dtype=F16).as_strided(near.shape, strides)
    far.copy_(near)
    target = torch.randint(3000, (4,), generator=draw)
    options = {"reduction": "none", "label_smoothing": 0.1}
    check(cross_entropy, cross_entropy_reference, (far, target), backend, **options)
    assert grown(before) < 1


def test_cross_entropy_of_many_ignored_rows():
    """Forward: ignored rows are not read."""
    before, classes = peak(), 32003
    rows = 2**31 // classes + 50
    logits = torch.empty(rows, classes, dtype=BF16)
    target = torch.full((rows,), -100)
    live = torch.tensor([0, rows // 2, rows - 2, rows - 1])
    draw = torch.Generator().manual_seed(0)
    near = torch.randn(len(live), classes, generator=draw).to(BF16)
    logits[live] = near
    target[live] = torch.tensor([5, 32002, 7, 0])
    losses = cross_entropy(logits, target, reduction="none")
    assert logits.numel() > 2**31
    assert torch.equal(losses[live], cross_entropy(near, target[live], reduction="none"))
    assert losses.count_nonzero() == len(live)
    assert grown(before) < 1


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=LARGE)], ids=str)
def test_linear_cross_entropy_of_so_many_logits(dtype):
    before, classes = peak(), 65600
    rows = 2**31 // classes + 50
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 8, generator=draw).to(dtype) for n in (rows, classes))
    target = torch.randint(classes, (rows,), generator=draw)
    losses, dx, dweight = losses_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, target, reduction="none"), x, weight
    )
    last = slice(rows - 60, rows)
    few = losses_and_gradients(
        lambda x, w: linear_cross_entropy(x, w, target[last], reduction="none"), x[last], weight
    )
    assert torch.equal(losses[last], few[0]) and torch.equal(dx[last], few[1])
    assert dweight.isfinite().all()
    assert grown(before) < 2


@grid(
    first=[2**31 // BLOCK, 2**32, 2**55],
    moments=["float32", "int8"],
    backend=[b for b in backends("adamw_step") if b != "cuda"],
)
def test_a_step_of_a_part_behind_as_many_elements(backend, moments, first):
    """The random numbers of blocks with such numbers: as the reference's."""
    for rounding, dtype in ((NEAREST, F32), (STOCHASTIC, BF16)):
        step = step_of([(1000,), (5, 512)], dtype, moments, rounding, backend=backend)
        kinds = [first if i % KINDS == KINDS - 1 else kind for i, kind in enumerate(step.kinds)]
        check_step(replace(step, kinds=kinds), backend)


@LARGE
def test_a_large_step():
    """12.7 GiB. Every part that is looked at is as a step of the part alone."""
    n = 2**31 + 3 * BLOCK + 77
    p, grad = filled(n, BF16, 0).requires_grad_(), filled(n, BF16, 1)
    p.grad = grad
    starts = [0, 2**30, 2**31 - 2**24, 2**31 - 1000 * BLOCK]
    parts = [slice(start, min(start + 1500 * BLOCK, n)) for start in starts]
    before = [p.detach()[part].clone() for part in parts]
    optimizer = AdamW8bit([p], lr=1e-2, seed=5)
    optimizer.step()
    optimizer.step()
    for part, q in zip(parts, before, strict=True):
        q.requires_grad_()
        q.grad = grad[part].clone()
        _step_as_a_part(q, part.start // BLOCK)
        assert torch.equal(q, p[part])
    state = optimizer.state[p]
    assert state["exp_avg_scale"].numel() == -(-n // BLOCK) and state["step"] == 2


def _step_as_a_part(q, first):
    """Two steps of 8-bit moments from zeros, of a part that begins at block `first`."""
    blocks = -(-q.numel() // BLOCK)
    m, v = torch.zeros_like(q, dtype=torch.int8), torch.zeros_like(q, dtype=torch.uint8)
    scales, step = [torch.zeros(blocks), torch.zeros(blocks)], torch.zeros(())
    options = [1e-2, 0.9, 0.999, 1e-8, 1e-2, 0.0, 0.0]
    kind = [0, STOCHASTIC, 0, 0, first]
    for _ in range(2):
        lists = [q.detach()], [q.grad], [m], [v], [step], [], scales, []
        torch.ops.fusedops.adamw_step(*lists, kind, options, [], 5)


@LARGE
def test_a_large_gradient_is_clipped():
    """8.4 GiB."""
    grad = filled(2**31 + 1000, BF16, 1)
    p = torch.empty_like(grad).requires_grad_()
    p.grad = grad
    norm = sum(part.double().square().sum() for part in grad.split(1 << 24)).sqrt()
    ends = [grad[:2000].clone(), grad[-2000:].clone()]
    returned = fusedops.clip_grad_norm_([p], 1.0)
    torch.testing.assert_close(returned, norm.float(), rtol=1e-6, atol=0)
    factor = (1 / (norm + 1e-6)).float()
    for clipped, end in zip((grad[:2000], grad[-2000:]), ends, strict=True):
        torch.testing.assert_close(clipped, (end.float() * factor).to(BF16), rtol=0, atol=0)


@LARGE
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_large_logits(reduction):
    """9 GiB: the logits and their gradient."""
    gc.collect()
    classes = 32003
    rows = 2**31 // classes + 50
    logits = filled((rows, classes), BF16, 0).requires_grad_()
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    target[[5, -3]] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
    losses = cross_entropy(logits, target, **options)
    (dlogits,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    for part in (slice(0, 20), slice(rows // 2, rows // 2 + 20), slice(rows - 80, rows)):
        few = logits.detach()[part].clone().requires_grad_()
        loss = cross_entropy(few, target[part], **options)
        (dfew,) = torch.autograd.grad(loss, few, torch.ones_like(loss))
        assert torch.equal(dfew, dlogits[part])
        assert reduction != "none" or torch.equal(loss, losses[part])
