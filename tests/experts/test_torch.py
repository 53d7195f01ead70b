"""The `experts` function in autocast and backward, and its module against transformers'."""

import copy

import pytest
import torch
from axes import grid

import fusedops
from experts.cases import OURS, Shape, inputs
from fusedops.functional import experts
from fusedops.testing import gradients


@grid(dtype=[torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """The products are in autocast's dtype, as F.linear's; gradients have the inputs' dtypes."""
    args = inputs(Shape(10, 2, 4, 40, 24, bias=True))
    with torch.autocast("cpu", dtype):
        actual = gradients(OURS, args)
    low = tuple(a.to(dtype) if i != 2 and a.is_floating_point() else a for i, a in enumerate(args))
    expected = gradients(OURS, low)
    assert actual["output 0"].dtype == dtype and torch.equal(
        actual["output 0"], expected["output 0"]
    )
    assert all(actual[f"gradient {i}"].dtype == torch.float32 for i in range(6))


def test_gradients_are_laid_out_as_the_weights():
    """Otherwise an optimizer's first step would copy them."""
    for transposed in (False, True):
        args = list(inputs(Shape(10, 2, 4, 40, 24), transposed=transposed))
        for t in args[3:5]:
            t.requires_grad_()
        OURS(*args, transposed=transposed).sum().backward()
        assert all(t.grad.stride() == t.stride() for t in args[3:5])


def qwen():
    moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = moe.Qwen3MoeConfig(num_experts=5, hidden_size=24, moe_intermediate_size=10)
    config._experts_implementation = "eager"
    module = moe.Qwen3MoeExperts(config)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return module


def test_module_is_the_twin_of_transformers_experts():
    theirs, ours = qwen(), fusedops.nn.Experts(5, 24, 10)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    args = inputs(Shape(11, 2, 5, 24, 10))[:3]
    torch.testing.assert_close(ours(*args), theirs(*args))
    theirs.load_state_dict(ours.state_dict(), strict=True)


@grid(bias=[False, True], activation=["silu", "gelu", None])
def test_module(bias, activation):
    module = fusedops.nn.Experts(5, 24, 10, bias=bias, activation=activation, dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    args = inputs(Shape(11, 2, 5, 24, 10), torch.bfloat16)[:3]
    expected = experts(
        *args,
        module.gate_up_proj,
        module.down_proj,
        gate_up_bias=module.gate_up_proj_bias,
        down_bias=module.down_proj_bias,
        activation=activation,
    )
    assert torch.equal(module(*args), expected) and copy.deepcopy(module)(*args).equal(expected)
    assert repr(module) == f"Experts(5, 24, 10, bias={bias}, activation={activation!r})"
    for weight in (module.gate_up_proj, module.down_proj):
        bound = weight.shape[-1] ** -0.5
        assert bound / 2 < weight.abs().max() <= bound * 1.01


def test_a_module_refuses_another_activation():
    with pytest.raises(ValueError, match=r"activation must be one of None, 'relu', .* got 'tanh'"):
        fusedops.nn.Experts(3, 4, 5, activation="tanh")
