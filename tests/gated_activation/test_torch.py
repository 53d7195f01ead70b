"""swiglu and geglu in PyTorch: autograd, functorch, compile, export, modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedops
from fusedops.functional import geglu, swiglu
from fusedops.testing import gradients, yardstick
from gated_activation.cases import FLOATS, GPT_OSS, KINDS, inputs

FORMS = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])


@pytest.mark.parametrize("kind", KINDS)
@FORMS
def test_double_backward(kind, packed):
    """Of gate, up and dy."""
    function, reference, how = KINDS[kind]
    args = inputs((6, 300), torch.float32, packed)
    draw = torch.Generator().manual_seed(3)
    dy = torch.randn(6, 300, generator=draw)
    directions = [torch.randn(a.shape, generator=draw) for a in args]

    def second(run, to):
        leaves = [a.to(to).requires_grad_() for a in (*args, dy)]
        y = run(*leaves[:-1], **how)
        first = torch.autograd.grad(y, leaves[:-1], leaves[-1], create_graph=True)
        return torch.autograd.grad(first, leaves, [d.to(to) for d in directions])

    found, eager = (second(run, torch.float32) for run in (function, reference))
    for values in zip(found, eager, second(reference, torch.float64), strict=True):
        assert yardstick(*values) is None


@pytest.mark.parametrize("kind", KINDS)
def test_gradgradcheck(kind):
    function, _, how = KINDS[kind]
    args = [a.requires_grad_() for a in inputs((2, 5), torch.float64)]
    assert torch.autograd.gradgradcheck(lambda *a: function(*a, **how), args)


@pytest.mark.parametrize("kind", KINDS)
@FORMS
def test_forward_mode_and_functorch(kind, packed):
    function, reference, how = KINDS[kind]
    x, *rest = inputs((4, 10), torch.float32, packed)
    t = torch.randn_like(x)

    def first(run):
        return lambda x: run(x, *rest, **how)

    for transform in (
        lambda f: torch.func.jvp(f, (x,), (t,))[1],
        lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, t])),
        lambda f: torch.func.jacrev(f)(x),
    ):
        torch.testing.assert_close(transform(first(function)), transform(first(reference)))


@pytest.mark.filterwarnings("error:There is a performance drop")
@FORMS
def test_vmap_sees_through_the_operator(packed):
    args = inputs((3, 4, 8), torch.float32, packed)
    torch.testing.assert_close(torch.vmap(swiglu)(*args), swiglu(*args))
    torch.testing.assert_close(torch.vmap(geglu)(*args), geglu(*args))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@FORMS
def test_composite_rounds_once(kind, dtype, packed):
    _, reference, how = KINDS[kind]
    args = inputs((50, 64), dtype, packed)
    name = "geglu" if "geglu" in kind else "swiglu"
    operator = getattr(torch.ops.fusedops, name)
    # vmap sees the composite, and differentiates it by ATen's formulas

    def composite(*args, **how):
        return torch.vmap(lambda *a: operator(*a, **how))(*(a.unsqueeze(0) for a in args))[0]

    found, eager = gradients(composite, args, **how), gradients(reference, args, **how)
    exact = gradients(reference, tuple(a.double() for a in args), **how)
    assert all(yardstick(found[key], eager[key], exact[key]) is None for key in found)


@pytest.mark.parametrize("kind", KINDS)
@FORMS
def test_inference_mode_and_no_grad(kind, packed):
    function, reference, how = KINDS[kind]
    args = inputs((4, 33), torch.float32, packed)
    with torch.inference_mode():
        found = function(*args, **how)
    torch.testing.assert_close(found, reference(*args, **how))
    assert not function(*args, **how).requires_grad
    with torch.no_grad():
        assert not function(*(a.requires_grad_() for a in args), **how).requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@FORMS
def test_opcheck(kind, dtype, packed):
    _, _, how = KINDS[kind]
    operator = getattr(torch.ops.fusedops, "geglu" if "geglu" in kind else "swiglu")
    args = tuple(a.requires_grad_() for a in inputs((3, 4, 20), dtype, packed))
    torch.library.opcheck(operator, args, how)


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True], [False, False]])
@FORMS
def test_opcheck_kernels(kind, mask, packed):
    args = inputs((5, 20), torch.float32, packed)
    args = (*args, None) if packed else args
    how = (kind, 0.7 if kind == "swiglu" else None, 1.5, 0.5)
    operators = torch.ops.fusedops
    torch.library.opcheck(operators.gated_activation_forward, (*args, *how))
    dy = torch.randn(5, 20)
    torch.library.opcheck(operators.gated_activation_backward, (dy, *args, *how, mask))


def test_kernels_refuse_to_be_differentiated():
    x = torch.randn(3, 8, requires_grad=True)
    y = torch.ops.fusedops.gated_activation_forward(x, None, "geglu", None, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@FORMS
def test_compile_with_dynamic_shapes(kind, packed):
    function, _, how = KINDS[kind]

    def step(x, *rest):
        return function(x * 2, *rest, **how)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        args = inputs((rows, 24), torch.float32, packed)
        found, expected = gradients(compiled, args), gradients(step, args)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("kind", KINDS)
@FORMS
def test_export_with_dynamic_shapes(kind, packed):
    function, _, how = KINDS[kind]

    class Module(nn.Module):
        def forward(self, args):
            return function(*args, **how)

    args, more = (list(inputs((rows, 24), torch.float32, packed)) for rows in (4, 9))
    rows = torch.export.Dim("rows")
    program = torch.export.export(Module(), (args,), dynamic_shapes=([{0: rows}] * len(args),))
    torch.testing.assert_close(program.module()(more), function(*more, **how))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("up_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_as_torch(dtype, up_dtype, device):
    gate, up = inputs((4, 16), dtype, up_dtype=up_dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast(device, torch.float16):
        for ours, theirs in (
            (swiglu(gate, up), F.silu(gate) * up),
            (geglu(gate, up), F.gelu(gate) * up),
        ):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_gradients_have_the_dtypes_of_their_tensors():
    gate, up = (t.requires_grad_() for t in inputs((4, 16), torch.bfloat16, up_dtype=torch.float32))
    y = swiglu(gate, up)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert (y.dtype, dgate.dtype, dup.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_checkpointing_and_an_output_that_is_changed_in_place():
    gate, up = (t.requires_grad_() for t in inputs((4, 16), torch.float32))
    expected = torch.autograd.grad(2 * swiglu(gate, up).sum(), (gate, up))
    y = torch.utils.checkpoint.checkpoint(swiglu, gate, up, use_reentrant=False)
    found = torch.autograd.grad(y.mul_(2).sum(), (gate, up))  # the backward does not need y
    assert all(map(torch.equal, found, expected))


def test_a_changed_input_is_noticed():
    gate, up = (t.requires_grad_() for t in inputs((4, 16), torch.float32))
    gate = gate * 1
    y = swiglu(gate, up)
    gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def float32(*shape, **to):
    return torch.zeros(*shape, **to)


ERRORS = {
    r"swiglu: gate must be float32, .*got int64 \[4, 8\]": lambda: swiglu(
        float32(4, 8, dtype=torch.int64)
    ),
    r"geglu: up must be float32, .*got int32 \[4\]": lambda: geglu(
        float32(4), float32(4, dtype=torch.int32)
    ),
    r"swiglu: up must have shape \[4, 8\] like gate, got float32 \[4, 9\]": lambda: swiglu(
        float32(4, 8), float32(4, 9)
    ),
    r"geglu: up must have shape \[4, 8\] like gate, got float16 \[8\]": lambda: geglu(
        float32(4, 8), float32(8, dtype=torch.float16)
    ),
    r"swiglu: up must be on cpu like gate, got meta": lambda: swiglu(
        float32(4), float32(4, device="meta")
    ),
    r"swiglu: without up, gate must be packed, .*even size, got float32 \[4, 7\]": lambda: swiglu(
        float32(4, 7)
    ),
    r"geglu: without up, gate must be packed, .*got float32 \[\]": lambda: geglu(float32(())),
    r"geglu: approximate must be 'none' or 'tanh', got 'erf'": lambda: geglu(
        float32(4), approximate="erf"
    ),
    r"swiglu: limit must be at least 0, got -1": lambda: swiglu(float32(4), limit=-1.0),
    r"swiglu: limit must be at least 0, got -?nan": lambda: swiglu(float32(4), limit=torch.nan),
    r"dy must have shape \[4, 8\] like y, got float32 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_backward(
            float32(4), float32(4, 16), None, "geglu", None, 1.0, 0.0, [True, True]
        )
    ),
    r"gated_activation: up must be Float like gate, got float16 \[4\]": lambda: (
        torch.ops.fusedops.gated_activation_forward(
            float32(4), float32(4, dtype=torch.float16), "geglu", None, 1.0, 0.0
        )
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_operator_argument_wanted_and_got(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        ERRORS[message]()


def test_meta_tensors():
    gate = torch.zeros(2, 3, 8, device="meta", dtype=torch.bfloat16)
    assert swiglu(gate).shape == (2, 3, 4) and swiglu(gate).dtype == torch.bfloat16
    y = geglu(gate, gate.float())
    assert y.shape == gate.shape and y.dtype == torch.float32 and y.is_meta


class Subclass(torch.Tensor):
    pass


def test_subclasses_and_modes_see_the_operator():
    x = torch.randn(3, 8).as_subclass(Subclass)
    assert type(swiglu(x)) is Subclass and type(geglu(x, x)) is Subclass
    traced = torch.fx.symbolic_trace(fusedops.nn.SwiGLU())
    torch.testing.assert_close(traced(torch.ones(2, 8)), swiglu(torch.ones(2, 8)))


@FORMS
def test_modules_are_their_functions(packed):
    args = inputs((3, 8), torch.bfloat16, packed)
    modules = fusedops.nn.SwiGLU(**GPT_OSS), fusedops.nn.GEGLU("tanh")
    assert torch.equal(modules[0](*args), swiglu(*args, **GPT_OSS))
    assert torch.equal(modules[1](*args), geglu(*args, approximate="tanh"))
    assert torch.equal(fusedops.nn.SwiGLU()(*args), swiglu(*args))
    assert torch.equal(fusedops.nn.GEGLU()(*args), geglu(*args))
    assert "limit=1.25, alpha=1.702, up_offset=1.0" in repr(modules[0])
    assert repr(modules[1]) == "GEGLU(approximate='tanh')"
    assert not any(module.state_dict() for module in modules)
