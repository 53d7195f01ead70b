"""Nested tensors: functions of rows take jagged ones, torch takes its own, the rest say which."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops import functional as ff
from fusedops.backends import FAMILIES

LENGTHS = 3, 1, 5
WEIGHT, BIAS = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 1, 8)
MATRIX = torch.linspace(-1, 1, 128).view(16, 8)
QUANTIZED = ff.quantize_weight(MATRIX, "int8")


def jagged(*lengths, width=8):
    rows = [torch.randn(n, width) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_()


def like(x):
    """Another jagged tensor of the same sequences."""
    return torch.nested.nested_tensor_from_jagged(torch.randn_like(x.values()), x.offsets())


# Functions of one jagged tensor of rows of 8.
OF_ROWS = {
    "layer_norm": lambda x: ff.layer_norm(x, (8,), WEIGHT, BIAS),
    "rms_norm": lambda x: ff.rms_norm(x, (8,), WEIGHT),
    "rms_norm of Llama": lambda x: ff.rms_norm(x, (8,), WEIGHT, rounding="llama", offset=1.0),
    "LayerNorm": fusedops.nn.LayerNorm(8),
    "RMSNorm": fusedops.nn.RMSNorm(8),
    "swiglu of both": partial(ff.swiglu, limit=1.0),
    "geglu of both": ff.geglu,
    "linear": lambda x: ff.linear(x, MATRIX, None, "gelu"),
    "Linear": fusedops.nn.Linear(8, 16),
    "quantized_linear": lambda x: ff.quantized_linear(x, QUANTIZED),
    "QuantizedLinear": fusedops.nn.QuantizedLinear.from_linear(torch.nn.Linear(8, 16), "int8"),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_give_what_their_values_give(name):
    function, x = OF_ROWS[name], jagged(*LENGTHS)
    values = x.values().detach().requires_grad_()
    y, want = function(x), function(values)
    assert y.layout == torch.jagged and y.shape[:2] == x.shape[:2]
    assert torch.equal(y.values(), want)
    y.values().square().sum().backward()
    want.square().sum().backward()
    assert torch.equal(x.grad.values(), values.grad)


PAIRS = {
    "add_layer_norm": lambda x, y: ff.add_layer_norm(x, y, WEIGHT, BIAS)[0],
    "add_rms_norm": lambda x, y: ff.add_rms_norm(x, y, WEIGHT)[1],
    "swiglu": ff.swiglu,
    "geglu": partial(ff.geglu, approximate="tanh"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_the_same_sequences(name):
    x = jagged(*LENGTHS)
    y = like(x)
    found = PAIRS[name](x, y)
    assert torch.equal(found.values(), PAIRS[name](x.values(), y.values()))
    assert torch.equal((found + x).offsets(), x.offsets())  # still the same sequences


@pytest.mark.parametrize("name", PAIRS)
def test_other_sequences_are_an_error(name):
    second = {"add_layer_norm": "residual", "add_rms_norm": "residual"}.get(name, "up")
    with pytest.raises(RuntimeError, match=f"{name}: {second} must have the sequences of the"):
        PAIRS[name](jagged(3, 1, 5), jagged(4, 2, 3))


def test_a_dense_argument_beside_a_jagged_one_is_an_error():
    with pytest.raises(RuntimeError, match=r"add_rms_norm: residual must be .* like x"):
        ff.add_rms_norm(jagged(3, 1, 5), torch.randn(3, 5, 8))


def test_heads_in_front_of_the_sequences():
    """[batch, heads, sequence, width], as projections give it to attention."""
    x = jagged(*LENGTHS).unflatten(-1, (2, 4)).transpose(1, 2)
    y = ff.rms_norm(x, (4,))
    want = F.rms_norm(x, (4,))
    assert y.shape == want.shape
    torch.testing.assert_close(y.values(), want.values())


def test_jagged_norms_compile():
    x = jagged(*LENGTHS)
    compiled = torch.compile(OF_ROWS["rms_norm"], backend="aot_eager")
    assert torch.equal(compiled(x).values(), OF_ROWS["rms_norm"](x).values())


def test_attention_of_jagged_tensors_is_torchs():
    x = jagged(*LENGTHS)
    q, k, v = (like(x).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3))
    got = ff.scaled_dot_product_attention(q, k, v)
    assert torch.equal(got.values(), F.scaled_dot_product_attention(q, k, v).values())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "linear"])
def test_torch_takes_its_strided_ones(name, layout):
    rows = [torch.randn(n, 8) for n in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=layout)
    got = OF_ROWS[name](x)
    for one, row in zip(got.unbind(), rows, strict=True):
        torch.testing.assert_close(one, OF_ROWS[name](row))


def refusals(layout):
    """Operator: a call of it, and the argument that is nested."""
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in LENGTHS], layout=layout)
    dense, targets = torch.randn(3, 5, 8), torch.zeros(3, dtype=torch.long)
    heads = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in LENGTHS], layout=layout)
    table = torch.randn(1, 5, 8)
    yield "attention", "q", lambda: ff.attention(heads, heads, heads)
    yield "rotary_embedding", "q", lambda: ff.rotary_embedding(heads, heads, table, table)
    yield "cross_entropy", "input", lambda: ff.cross_entropy(x, targets)
    yield "linear_cross_entropy", "input", lambda: ff.linear_cross_entropy(x, MATRIX, targets)
    if layout == torch.jagged:
        return
    yield "add_layer_norm", "x", lambda: ff.add_layer_norm(x, x)
    yield "add_rms_norm", "residual", lambda: ff.add_rms_norm(dense, x)
    yield "swiglu", "gate", lambda: ff.swiglu(x, x)
    yield "geglu", "gate", lambda: ff.geglu(x)
    yield "quantized_linear", "x", lambda: ff.quantized_linear(x, QUANTIZED)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_the_others_name_the_argument(layout):
    for op, argument, call in refusals(layout):
        with pytest.raises(
            TypeError, match=f"^{op}: {argument} must be a dense tensor, got a nest"
        ):
            call()


def test_every_operator_takes_or_refuses_them():
    refused = {op for op, *_ in refusals(torch.strided)}
    taken_by_torch = {"layer_norm", "rms_norm", "linear"}
    operators = {op for family, ops in FAMILIES.items() if family != "adamw" for op in ops}
    assert refused | taken_by_torch == operators
