"""Quantized layers whose codes are nn.Parameters: state dicts, casts, writes, copies, formats."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from axes import grid
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fusedops.nn import QuantizedExperts, QuantizedLinear, codes_as_buffers, codes_as_parameters
from quantized_linear.cases import FORMATS, layer, random_weight, same

# in_features, out_features: blocks that end with a row, and blocks that do not.
SHAPES = [(128, 6), (70, 33), (1, 1)]


def codes(module):
    return {name: p for name, p in module.named_parameters() if p.dtype == torch.uint8}


@grid(kind=list(FORMATS), shape=SHAPES)
def test_parameters_and_back(kind, shape):
    module, _, x = layer(kind, *shape)
    before, y = copy.deepcopy(module), module(x)
    pointer = module.qweight.data_ptr()
    assert codes_as_parameters(module) is module and module.holds_parameters
    assert not module._buffers and module.qweight.data_ptr() == pointer
    parameters = codes(module)
    assert len(parameters) == len(before._buffers)
    for p in parameters.values():
        assert not p.requires_grad and p.shape[2:].numel() == 1
    assert torch.equal(module(x), y)
    assert torch.equal(module.weight + 0, before.weight + 0)
    codes_as_parameters(module)  # as it is
    assert codes_as_buffers(module) is module and not codes(module)
    assert same(module, before)


@grid(kind=list(FORMATS))
def test_rows_are_cut_between_blocks(kind):
    """So half of the parameters' rows are half of the weight's rows, where blocks end with rows."""
    module, _, x = layer(kind, 128, 6)
    y = module(x)
    codes_as_parameters(module)
    half = QuantizedLinear(
        128, 3, format=module.format, group_size=FORMATS[kind][1].get("group_size")
    )
    codes_as_parameters(half)
    with torch.no_grad():
        for name, p in codes(half).items():
            p.copy_(codes(module)[name][:3])
        half.bias.copy_(module.bias[:3])
    torch.testing.assert_close(half(x), y[:, :3])


@grid(kind=list(FORMATS))
def test_state_dicts_of_either_form_load_into_either(kind):
    plain, linear, x = layer(kind)
    bytewise = codes_as_parameters(copy.deepcopy(plain))
    states = [module.state_dict() for module in (plain, bytewise, linear)]
    for state in (*states, bytewise.state_dict(keep_vars=True)):
        state = copy.deepcopy(state)
        for holds_parameters in (False, True):
            other = QuantizedLinear(70, 33, format=plain.format, **FORMATS[kind][1])
            if holds_parameters:
                codes_as_parameters(other)
            assert not torch.equal(other(x), plain(x))
            other.load_state_dict(state)
            assert torch.equal(other(x), plain(x))
            assert other.holds_parameters == holds_parameters


FORMS = {"buffers": codes_as_buffers, "parameters": codes_as_parameters}
OTHERS = [("int8", "fp8"), ("fp8", "int8"), ("int4", "nf4"), ("nf4", "int8")]


@pytest.mark.parametrize("format,other", OTHERS)
@grid(saved=FORMS, form=FORMS)
def test_codes_of_another_format_do_not_load(saved, form, format, other):
    state = FORMS[saved](QuantizedLinear(128, 6, False, format=format)).state_dict()
    module = FORMS[form](QuantizedLinear(128, 6, False, format=other))
    before = copy.deepcopy(module)
    alike = {format, other} == {"int8", "fp8"}  # in the tensors' names
    with pytest.raises(RuntimeError, match="qweight must be" if alike else "QuantizedLinear"):
        module.load_state_dict(state)
    assert same(module, before) or not alike


@grid(format=["int8", "fp8"])
def test_checkpoints_of_another_format_do_not_load(format, tmp_path):
    """torch.distributed.checkpoint would convert a dtype, but compares shapes."""
    other = {"int8": "fp8", "fp8": "int8"}[format]
    state = codes_as_parameters(QuantizedLinear(128, 6, format=format)).state_dict()
    dcp.save(state, checkpoint_id=tmp_path)
    module = codes_as_parameters(QuantizedLinear(128, 6, format=other))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(module.state_dict(), checkpoint_id=tmp_path)


@grid(kind=list(FORMATS), dtype=[torch.bfloat16, torch.float64])
def test_casts_leave_the_bytes(kind, dtype):
    """torch.nn.Module.type casts integers too."""
    module, _, _ = layer(kind)
    before = copy.deepcopy(module)
    for turn in (codes_as_buffers, codes_as_parameters):
        turn(module).type(dtype).to(dtype)
        assert module.dtype == module.bias.dtype == dtype
        assert all(p.dtype == torch.uint8 for p in codes(module).values())
    codes_as_buffers(module).bias = before.bias = None
    assert same(module, before)


@grid(kind=list(FORMATS))
def test_a_view_of_an_odd_offset(kind):
    """Engines that flatten parameters put them anywhere; writes go there."""
    module, _, x = layer(kind)
    other, y = copy.deepcopy(module), module(x)
    codes_as_parameters(module)
    for p in codes(module).values():
        flat = torch.cat([torch.zeros(1, dtype=torch.uint8), p.detach().reshape(-1)])
        p.data = flat[1:].view(p.shape)
    assert torch.equal(module(x), y)
    change = random_weight(33, 70)
    module.weight.data.copy_(change)
    assert all(p.storage_offset() == 1 for p in codes(module).values())
    other.weight.data.copy_(change)
    assert same(codes_as_buffers(module), other)


def through_meta(model):
    state = model.state_dict()
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


def assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model


SAME = copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_meta, assigned


@grid(change=[lambda m: m, *SAME], form=FORMS)
def test_requires_grad_of_a_model_leaves_the_codes(change, form):
    inner = QuantizedLinear(128, 6, format="nf4"), QuantizedExperts(2, 6, 8, bias=True)
    model = FORMS[form](nn.ModuleList([nn.Linear(128, 128), *inner]))
    floats = {name for name, p in model.named_parameters() if p.is_floating_point()}
    x = torch.randn(3, 128)
    y = model[1](x)
    model = change(model)
    for on, expected in ((False, set()), (True, floats)):
        assert model.requires_grad_(on) is model
        assert {name for name, p in model.named_parameters() if p.requires_grad} == expected
    assert torch.equal(model[1](x), y)
    with pytest.raises(RuntimeError, match="floating point"):
        model[1].qweight.requires_grad = True


def test_saved_parameters_load_without_fusedops(tmp_path):
    """weights_only, torch's default, refuses unknown classes."""
    module = codes_as_parameters(QuantizedLinear(128, 6))
    torch.save(dict(module.named_parameters()), tmp_path / "saved")
    assert all(type(p) is nn.Parameter for p in torch.load(tmp_path / "saved").values())


@grid(kind=list(FORMATS))
def test_writes_to_the_weight(kind):
    """As with buffers: quantized, and undone bit for bit."""
    module, _, _ = layer(kind)
    before = copy.deepcopy(module)
    codes_as_parameters(module)
    change = random_weight(33, 70)
    module.weight.data += change
    assert not torch.equal(module.weight + 0, before.weight + 0)
    module.weight.data -= change
    assert torch.equal(module.weight + 0, before.weight + 0)
    module.weight = nn.Parameter(change)
    other = copy.deepcopy(before)
    other.weight = nn.Parameter(change)
    assert torch.equal(module.weight + 0, other.weight + 0)


def test_gradients_compile_and_copies():
    module, _, x = layer("nf4")
    x.requires_grad_()

    def gradient(run):
        (grad,) = torch.autograd.grad(run(x).sin().sum(), x)
        return grad

    expected = gradient(module)
    codes_as_parameters(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for run in (module, copy.deepcopy(module), compiled):
        torch.testing.assert_close(gradient(run), expected)


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8"])
def test_experts(format):
    """Of a shape whose blocks span the experts' rows."""
    torch.manual_seed(0)
    module = QuantizedExperts(4, 24, 40, format=format, bias=True)
    state = {name: torch.randn(4, *s) for name, s in SHAPES_OF_EXPERTS.items()}
    module.load_state_dict(state)
    x, index = torch.randn(7, 24), torch.randint(0, 4, (7, 2))
    weights = torch.rand(7, 2)
    y, before = module(x, index, weights), copy.deepcopy(module)
    codes_as_parameters(module)
    assert len(codes(module)) == len([*before.buffers()]) and not [*module.buffers()]
    assert torch.equal(module(x, index, weights), y)
    before.load_state_dict(module.state_dict())
    module.load_state_dict(state)
    assert torch.equal(before(x, index, weights), y)
    assert torch.equal(codes_as_buffers(module)(x, index, weights), y)


SHAPES_OF_EXPERTS = {
    "gate_up_proj": (80, 24),
    "down_proj": (24, 40),
    "gate_up_proj_bias": (80,),
    "down_proj_bias": (24,),
}


@pytest.mark.parametrize("change", [codes_as_buffers, codes_as_parameters])
def test_only_modules_have_codes(change):
    with pytest.raises(
        TypeError, match=f"{change.__name__}: model must be a torch.nn.Module, got str"
    ):
        change("model")
    plain = nn.Linear(2, 2)
    assert change(plain) is plain and len([*plain.parameters()]) == 2
