"""Differentiable operators in autograd: gradients, double backward, functorch, checkpointing."""

from collections.abc import Callable
from functools import partial
from itertools import islice, product

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusedops
from contract.family import (
    BF16,
    CALLS,
    EVERY,
    F16,
    F32,
    F64,
    FAMILIES,
    FUNCTIONS,
    as_tuple,
    each,
    floating,
    moved,
    on,
    over,
)
from fusedops.testing import gradients, yardstick


def test_every_family_with_gradients_is_under_contract():
    assert FAMILIES.keys() == fusedops.backends.FAMILIES.keys() - {"adamw"}
    called = {call.operator for f in FAMILIES.values() for call in f.calls.values()}
    operators = {op for name in FAMILIES for op in fusedops.backends.FAMILIES[name]}
    assert called == operators


def _twice(family):
    """All on the first backend. The others run their own kernels in the first forward alone."""
    for place, backend in enumerate(family.backends):
        calls = family.calls if place else family.calls | family.more | family.twice
        shapes = product(family.batches, family.dtypes)
        for batch, dtype in islice(shapes, 1) if place else shapes:
            for name, call in calls.items():
                of = f"{name}-{backend}-{batch}-{dtype}"
                yield of, (call, backend, batch, dtype, family.draws)


@each("call,backend,batch,dtype,draws", _twice)
def test_double_backward(call, backend, batch, dtype, draws):
    function, reference, leaves = call.both(call.args(*batch, dtype=dtype, backend=backend))
    inputs = moved(leaves, draws)

    def second(run: Callable, to: torch.dtype) -> list[torch.Tensor]:
        actual = []
        for tensors in inputs:
            given = [x.detach().to(to).requires_grad_() for x in tensors]
            torch.manual_seed(3)
            loss = sum(o.sin().sum() for o in as_tuple(run(*given)))
            first = torch.autograd.grad(loss, given, create_graph=True)
            actual.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
        return [torch.stack(same) for same in zip(*actual, strict=True)]

    with on(backend):
        actual = second(function, dtype)
    eager, exact = second(reference, dtype), second(reference, F64)
    for values in zip(actual, eager, exact, strict=True):
        assert yardstick(*values) is None


def seeded(run: Callable, *args: torch.Tensor) -> torch.Tensor | tuple:
    torch.manual_seed(0)
    return run(*args)


@each("call", lambda f: ((n, (c,)) for n, c in (f.calls | f.more | f.twice).items()))
def test_gradgradcheck_in_float64(call):
    """float64 runs the definition, on every backend, and so does every double backward."""
    run, leaves = call.on_leaves(call.function, call.args(2, dtype=F64, tiny=True))
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(partial(seeded, run), leaves)
    assert torch.autograd.gradgradcheck(partial(seeded, run), leaves)


@EVERY
def test_float64_is_exact(call, backend):
    """No kernel has it: the definition runs."""
    function, reference, leaves = call.both(call.args(20, dtype=F64, backend=backend))
    with on(backend):
        actual = gradients(function, leaves)
    torch.testing.assert_close(actual, gradients(reference, leaves), rtol=1e-12, atol=1e-12)


@CALLS
def test_forward_mode_and_functorch(call, backend):
    function, reference, (x, *rest) = call.both(call.args(4, backend=backend))
    t = torch.randn_like(x)

    def first(run: Callable) -> Callable:
        return lambda x: as_tuple(run(x, *rest))[0]

    with on(backend):
        for transform in (
            lambda f: torch.func.jvp(f, (x,), (t,))[1],
            lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
            lambda f: torch.func.vmap(f)(torch.stack([x, t])),
            lambda f: torch.func.jacrev(f)(x),
        ):
            torch.testing.assert_close(transform(first(function)), transform(first(reference)))


def _composites(family):
    for name, call in family.calls.items():
        for dtype in (F32, F16, BF16) if call.smooth else (F32,):
            yield f"{name}-{dtype}", (call, family.draws, dtype)


@pytest.mark.filterwarnings("error:There is a performance drop")
@each("call,draws,dtype", _composites)
def test_composite_rounds_once(call, draws, dtype):
    """vmap sees through the operator, and differentiates the composite by ATen's formulas."""
    function, reference, leaves = call.both(call.args(50, dtype=dtype))

    def composite(*leaves: torch.Tensor) -> tuple:
        outputs = torch.vmap(function)(*(x.unsqueeze(0) for x in leaves))
        return tuple(o[0] for o in as_tuple(outputs))

    inputs = moved(leaves, min(draws, 8))
    actual, eager = (over(run, inputs, dtype) for run in (composite, reference))
    exact = over(reference, inputs, F64)
    assert {k: c for k in actual if (c := yardstick(actual[k], eager[k], exact[k]))} == {}


@CALLS
def test_inference_mode_and_no_grad(call, backend):
    function, reference, leaves = call.both(call.args(20, backend=backend))
    with on(backend):
        with torch.inference_mode():
            outputs = function(*leaves)
        torch.testing.assert_close(outputs, reference(*leaves))
        assert not any(o.requires_grad for o in as_tuple(function(*leaves)))
        with torch.no_grad():
            outputs = function(*(x.requires_grad_() for x in leaves))
    assert not any(o.requires_grad for o in as_tuple(outputs))


@CALLS
def test_arguments_and_gradients_are_never_written_to(call, backend):
    args = call.args(6, backend=backend)
    run, leaves = call.on_leaves(call.function, args)
    before = [a.clone() for a in args if isinstance(a, torch.Tensor)]
    with on(backend):
        outputs = as_tuple(run(*(x.requires_grad_() for x in leaves)))
        cotangents = [torch.randn_like(o) for o in outputs]
        kept = [c.clone() for c in cotangents]
        torch.autograd.backward(outputs, cotangents)
    assert all(map(torch.equal, cotangents, kept))
    assert all(map(torch.equal, (a for a in args if isinstance(a, torch.Tensor)), before))


@FUNCTIONS
def test_batched_gradients(call):
    """Of many output gradients at once."""
    run, leaves = call.on_leaves(call.function, call.args(6))
    leaves = [x.requires_grad_() for x in leaves]
    outputs = as_tuple(run(*leaves))
    cotangents = [torch.randn(3, *o.shape) for o in outputs]
    each = [
        torch.autograd.grad(outputs, leaves, [c[i] for c in cotangents], retain_graph=True)
        for i in range(3)
    ]
    actual = torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True)
    for batched, *ones in zip(actual, *each, strict=True):
        torch.testing.assert_close(batched, torch.stack(ones))


@FUNCTIONS
def test_a_traced_gradient(call):
    run, leaves = call.on_leaves(call.function, call.args(6))

    def gradient(*args: torch.Tensor) -> tuple:
        inputs = [x.detach().requires_grad_() for x in args]
        return torch.autograd.grad(sum(o.sum() for o in as_tuple(run(*inputs))), inputs)

    torch.testing.assert_close(make_fx(gradient)(*leaves)(*leaves), gradient(*leaves))


def _checkpointed(family):
    for name, call in family.calls.items():
        for backend in family.backends:
            yield f"{name}-{backend}", (call, backend, not family.keeps_outputs)


@each("call,backend,in_place", _checkpointed)
def test_checkpointing_and_outputs_that_are_changed_in_place(call, backend, in_place):
    run, leaves = call.on_leaves(call.function, call.args(12, backend=backend))
    leaves = [x.requires_grad_() for x in leaves]
    with on(backend):
        outputs = as_tuple(run(*leaves))
        expected = torch.autograd.grad(sum((2 * o).sum() for o in outputs), leaves)
        outputs = as_tuple(checkpoint(run, *leaves, use_reentrant=False))
        doubled = [o.mul_(2) if in_place else 2 * o for o in outputs]
        actual = torch.autograd.grad(sum(o.sum() for o in doubled), leaves)
    assert all(map(torch.equal, actual, expected))


def _changed(family):
    for name, call in family.calls.items():
        for place, backend in product(call.kept, family.backends):
            yield f"{name}-{place}-{backend}", (call, backend, place)


@each("call,backend,place", _changed)
def test_a_changed_argument_is_noticed(call, backend, place):
    leaves = [a.requires_grad_() if floating(a) and i not in call.still else a
            for i, a in enumerate(call.args(6, backend=backend))]  # fmt: skip
    args = [a * 1 if floating(a) else a for a in leaves]
    positional, named = call.by_name(tuple(args))
    with on(backend):
        outputs = as_tuple(call.function(*positional, **named))
        args[place].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(o.sum() for o in outputs).backward()


def _first_kernel(family):
    variant = next(iter(family.kernels.values()))
    yield from ((backend, (variant, backend)) for backend in family.backends)


@each("variant,backend", _first_kernel)
def test_kernels_refuse_to_be_differentiated(variant, backend):
    name, (x, *rest) = next(variant(torch.device("cpu")))
    with on(backend):
        outputs = getattr(torch.ops.fusedops, name)(x.requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="not implemented"):
        as_tuple(outputs)[0].sum().backward()
