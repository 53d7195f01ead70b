"""scaled_add works in PyTorch: opcheck, autograd, functorch, compile, modules, errors."""

import pytest
import torch

import fusedops
from fusedops.functional import scaled_add
from fusedops.functional.scaled_add import scaled_add_reference
from scaled_add.cases import FLOATS, inputs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(dtype):
    x, residual = inputs((4, 33), dtype)
    leaves = x.requires_grad_(), residual.requires_grad_()
    ops = torch.ops.fusedops
    torch.library.opcheck(ops.scaled_add, (*leaves, 0.5))
    torch.library.opcheck(ops.scaled_add_forward, (x.detach(), residual.detach(), 0.5))
    torch.library.opcheck(ops.scaled_add_backward, (x.detach(), 0.5))


def test_gradgradcheck():
    args = [a.requires_grad_() for a in inputs((2, 5), torch.float64)]
    assert torch.autograd.gradcheck(scaled_add, (*args, 0.5))
    assert torch.autograd.gradgradcheck(lambda *a: scaled_add(*a, 0.5).sin(), args)


def test_double_backward_of_float32():
    def second(run, args):
        loss = run(*args, 0.5).sin().sum()
        first = torch.autograd.grad(loss, args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    args = [a.requires_grad_() for a in inputs((6, 9), torch.float32)]
    torch.testing.assert_close(second(scaled_add, args), second(scaled_add_reference, args))


def test_functorch():
    x, residual = inputs((3, 8), torch.float32)
    torch.testing.assert_close(torch.vmap(scaled_add)(x, residual), x + residual)
    found = torch.func.grad(lambda r: scaled_add(x, r, 2.0).sin().sum())(residual)
    torch.testing.assert_close(found, 2 * (x + 2 * residual).cos())


def test_compile():
    compiled = torch.compile(scaled_add, backend="aot_eager", fullgraph=True)
    args = [a.requires_grad_() for a in inputs((4, 33), torch.float32)]
    y = compiled(*args, 0.5)
    assert torch.equal(y, scaled_add(*args, 0.5))
    wanted = torch.autograd.grad(scaled_add(*args, 0.5).sin().sum(), args)
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), args), wanted)


def test_a_gradient_that_nobody_asked_for():
    x, residual = inputs((4, 8), torch.float32)
    y = scaled_add(x, residual.requires_grad_(), 3.0)
    assert torch.equal(torch.autograd.grad(y.sum(), residual)[0], torch.full_like(x, 3))


def test_the_module_is_its_function():
    args = inputs((3, 8), torch.bfloat16)
    module = fusedops.nn.ScaledAdd(0.25)
    assert torch.equal(module(*args), scaled_add(*args, 0.25))
    assert repr(module) == "ScaledAdd(scale=0.25)" and not module.state_dict()


def test_the_report_lists_it():
    (line,) = (x for x in fusedops.env_report().splitlines() if x.startswith("scaled_add "))
    assert line.split()[1] == "cpu" and "triton:" not in line


ERRORS = {
    r"scaled_add: x must be float32, .* got int64 \[2\]": (torch.arange(2), torch.arange(2)),
    r"scaled_add: residual must .* got float16 \[2\]": (torch.ones(2), torch.ones(2).half()),
    r"scaled_add: residual must .* got float32 \[3\]": (torch.ones(2), torch.ones(3)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_operator_argument_wanted_and_got(message):
    with pytest.raises(RuntimeError, match=message):
        scaled_add(*ERRORS[message])


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(TypeError, match="scaled_add: x must be a dense tensor, got a nested one"):
        scaled_add(x, x)
