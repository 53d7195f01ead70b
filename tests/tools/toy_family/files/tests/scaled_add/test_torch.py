"""scaled_add in PyTorch, beyond the contract: unneeded gradients, the module, the report."""

import pytest
import torch

import fusedops
from fusedops.functional import scaled_add
from scaled_add.cases import inputs


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
    lines = fusedops.env_report().splitlines()
    assert [x.split()[1] for x in lines if x.startswith("scaled_add ")] == ["cpu"]
    assert not any("scaled_add" in x for x in lines if x.startswith("triton "))


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(TypeError, match="scaled_add: x must be a dense tensor, got a nested one"):
        scaled_add(x, x)
