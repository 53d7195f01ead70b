"""Functions that accept nested tensors, and errors of the functions that do not."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from axes import grid

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
    out = PAIRS[name](x, y)
    assert torch.equal(out.values(), PAIRS[name](x.values(), y.values()))
    assert torch.equal((out + x).offsets(), x.offsets())  # still the same sequences


@pytest.mark.parametrize("name", PAIRS)
def test_other_sequences_are_an_error(name):
    first, second = ("gate", "up") if name in ("swiglu", "geglu") else ("x", "residual")
    with pytest.raises(RuntimeError, match=f"{name}: {second} must have the sequences of {first}"):
        PAIRS[name](jagged(3, 1, 5), jagged(4, 2, 3))


TWO_EACH = torch.tensor([2, 2])


def two_each(*starts):
    """Two sequences of two rows each, which start in the values at `starts`."""
    values, offsets = torch.randn(12, 8), torch.tensor([*starts, 8])
    return torch.nested.nested_tensor_from_jagged(values, offsets, TWO_EACH)


@pytest.mark.parametrize("name", PAIRS)
def test_other_offsets_of_the_same_lengths_are_an_error(name):
    x, y = two_each(0, 4), two_each(0, 2)
    assert x.shape == y.shape  # the lengths alone are in it
    with pytest.raises(RuntimeError, match=f"^{name}: .* must have the offsets of .*, got"):
        PAIRS[name](x, y)


@pytest.mark.parametrize("name", PAIRS)
def test_equal_offsets_in_two_tensors(name):
    x, y = two_each(0, 4), two_each(0, 4)
    for got, *rows in zip(*(t.unbind() for t in (PAIRS[name](x, y), x, y)), strict=True):
        torch.testing.assert_close(got, PAIRS[name](*rows))


def dense_beside_jagged():
    """A call, and its error."""
    x, dense = jagged(3, 1, 5).detach(), torch.randn(9, 8)
    strided = torch.nested.nested_tensor([torch.randn(n, 8) for n in LENGTHS])
    tokens = r"float32 \[9, 8\]"
    yield partial(ff.swiglu, dense, x), f"swiglu: gate must be jagged like up, got {tokens}"
    yield partial(ff.geglu, x, strided), "geglu: up must be jagged like gate, got a strided nested"
    yield (
        partial(ff.add_layer_norm, x, dense),
        f"add_layer_norm: residual must be jagged like x, got {tokens}",
    )


@pytest.mark.parametrize("call, message", list(dense_beside_jagged()))
def test_a_dense_argument_beside_a_jagged_one_is_an_error(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def jagged_parameters():
    """Operator: a call of it, and the argument that must not be jagged."""
    x, dense = jagged(3, 1, 5).detach(), torch.randn(9, 8)
    yield "linear", "weight", lambda: ff.linear(dense, x)
    yield "linear", "bias", lambda: ff.linear(x, MATRIX, x)
    yield "quantized_linear", "bias", lambda: ff.quantized_linear(x, QUANTIZED, x)
    yield "layer_norm", "weight", lambda: ff.layer_norm(x, (8,), x)
    yield "add_layer_norm", "bias", lambda: ff.add_layer_norm(x, x, WEIGHT, x)
    yield "add_rms_norm", "weight", lambda: ff.add_rms_norm(dense, dense, x)


@pytest.mark.parametrize("op, argument, call", list(jagged_parameters()))
def test_a_jagged_parameter_is_an_error(op, argument, call):
    with pytest.raises(TypeError, match=f"^{op}: {argument} must be a dense tensor, got a nested"):
        call()


def ragged_too_late():
    """Operator: a call of it that would read across sequences, and its error."""
    x = jagged(3, 1, 6).detach()
    transposed = x.transpose(1, 2)  # [3, 8, sequence]
    dim, got = "the last dimension", r"got \[3, 8, j\d+\]"
    yield lambda: ff.rms_norm(transposed, (10,)), f"rms_norm: input .* {dim}, {got}"
    last_two = r"layer_norm: input .* the last 2 dimensions, got \[3, j\d+, 8\]"
    yield partial(ff.layer_norm, x, (10, 8)), last_two
    yield lambda: ff.add_rms_norm(transposed, transposed), f"add_rms_norm: x .* {dim}, {got}"
    yield lambda: ff.linear(transposed, torch.randn(16, 10)), f"linear: input .* {dim}, {got}"
    yield (
        lambda: ff.quantized_linear(transposed, ff.quantize_weight(torch.randn(16, 10), "int8")),
        f"quantized_linear: x .* {dim}, {got}",
    )
    yield lambda: ff.swiglu(transposed), f"swiglu: gate .* {dim}, {got}"
    yield lambda: ff.geglu(transposed, transposed), f"geglu: gate .* {dim}, {got}"


@pytest.mark.parametrize("call, message", list(ragged_too_late()))
def test_rows_across_sequences_are_an_error(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("name", ["rms_norm", "linear", "swiglu of both"])
def test_one_graph_of_jagged_rows(name):
    x = jagged(*LENGTHS)
    compiled = torch.compile(OF_ROWS[name], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).values(), OF_ROWS[name](x).values())
    pair = torch.compile(PAIRS["add_rms_norm"], backend="aot_eager", fullgraph=True)
    assert torch.equal(pair(x, like(x)).offsets(), x.offsets())


def test_attention_of_jagged_tensors_is_torchs():
    x = jagged(*LENGTHS)
    q, k, v = (like(x).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3))
    got = ff.scaled_dot_product_attention(q, k, v)
    assert torch.equal(got.values(), F.scaled_dot_product_attention(q, k, v).values())


@grid(layout=[torch.jagged, torch.strided], name=["layer_norm", "linear"])
def test_torch_takes_its_strided_ones(name, layout):
    rows = [torch.randn(n, 8) for n in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=layout)
    got = OF_ROWS[name](x)
    for out, row in zip(got.unbind(), rows, strict=True):
        torch.testing.assert_close(out, OF_ROWS[name](row))


OPERATORS = [op for family, ops in FAMILIES.items() if family != "adamw" for op in ops]
TAKEN_BY_TORCH = {"layer_norm", "rms_norm", "linear"}
PLAIN = {"int": 0, "float": 0.0, "bool": False, "str": ""}  # others are optional


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in TAKEN_BY_TORCH])
def test_every_other_operator_refuses_them(op, autocast):
    """By the dispatcher, whatever the other arguments are."""
    schema = getattr(torch.ops.fusedops, op).default._schema
    needed = [a for a in schema.arguments if not a.has_default_value()]
    given = [torch.ones(2) if str(a.type) == "Tensor" else PLAIN.get(str(a.type)) for a in needed]
    given[0] = torch.nested.nested_tensor([torch.randn(n, 8) for n in LENGTHS])
    message = f"^{op}: {needed[0].name} must be a dense tensor, got a n"
    with (
        pytest.raises(TypeError, match=message),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        getattr(torch.ops.fusedops, op)(*given)
