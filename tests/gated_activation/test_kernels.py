"""swiglu and geglu match their references on every backend."""

import pytest
import torch
from axes import grid
from contract.family import FAMILIES
from contract.quantized_rows import FORMATS
from contract.quantized_rows import compare as compare_rows
from contract.wrapped import viewed, with_gradients_of

import fusedops
from fusedops.functional import geglu, swiglu
from fusedops.references import gated_activation
from fusedops.testing import check, device_of, gradients, placed, threads
from gated_activation.cases import BACKENDS, CASES, FLOATS, GPT_OSS, KINDS, PACKED, compare, inputs

SEPARATE = FAMILIES["gated_activation"].coded_rows["swiglu separate"]
# one element, odd, 3-D, past a power of two, many short rows, one long row
SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001)]


@grid(PACKED, "kind,backend", CASES, dtype=FLOATS, shape=SHAPES)
def test_forward_and_gradients(kind, backend, dtype, packed, shape):
    compare(kind, backend, inputs(shape, dtype, packed))


@pytest.mark.parametrize("kind,backend", CASES)
def test_no_dimensions(kind, backend):
    compare(kind, backend, inputs((), torch.float32))


@grid(PACKED, "kind,backend", CASES, shape=[(0, 8), (3, 0), (0, 0), (2, 0, 4)])
def test_empty(kind, backend, shape, packed):
    compare(kind, backend, inputs(shape, torch.float32, packed))


@grid(backend=BACKENDS, dtype=FLOATS, up_dtype=FLOATS)
def test_up_in_another_dtype(backend, dtype, up_dtype):
    for kind in ("swiglu limited", "geglu"):
        compare(kind, backend, inputs((6, 90), dtype, up_dtype=up_dtype))
    for format in FORMATS:
        compare_rows(SEPARATE, backend, inputs((6, 90), dtype, up_dtype=up_dtype), format)


@grid(
    backend=BACKENDS,
    limit=[None, 0.0, 0.5, 7.0],
    alpha=[1.0, 1.702, -0.5, 0.0],
    up_offset=[0.0, 1.0, -2.5],
)
def test_limit_alpha_and_offset(backend, limit, alpha, up_offset):
    kwargs = {"limit": limit, "alpha": alpha, "up_offset": up_offset}
    for args in (inputs((1500,), torch.float32), inputs((1500,), torch.float16, packed=True)):
        check(swiglu, gated_activation.swiglu_reference, args, backend, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bounds_pass_the_gradient(backend):
    """Like in torch's clamp: one step beyond the bound and for NaN the gradient is 0."""
    bounds = torch.tensor([-2.0, 2.0, -2.0000002, 2.0000002, torch.nan])
    gate, up = bounds.repeat(5), bounds.repeat_interleave(5)
    with fusedops.backend(backend):
        args = placed((gate, up), device_of(backend))
        actual = gradients(swiglu, args, limit=2.0, up_offset=1.0)
    expected = gradients(gated_activation.swiglu_reference, args, limit=2.0, up_offset=1.0)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, equal_nan=True)
        assert torch.equal(actual[key] == 0, value == 0)


# Around where the sigmoid, the tail and the cube of tanh's formula end.
FAR = [0.0, -0.0, 1e-6, 1e-30, 1e-45, 0.5, 5.0, 9.0, 13.2, 13.4, 19.9, 20.1, 87.0, 88.5, 104.0, 1e4]
FAR += [1e13, 1e20, 3e38, torch.inf]


@grid("kind,backend", CASES, sign=[1, -1])
def test_each_value_alone(kind, backend, sign):
    """Checks each element, so that none hides behind a larger one's error."""
    function, reference, kwargs = KINDS[kind]
    gate = torch.tensor(FAR) * sign
    args = placed((gate, torch.full_like(gate, 0.75)), device_of(backend))
    with fusedops.backend(backend):
        actual = gradients(function, args, **kwargs)
    exact = gradients(reference, tuple(t.double() for t in args), **kwargs)
    for key, value in exact.items():
        value = value.float()
        assert torch.equal(actual[key].isnan(), value.isnan()), key
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=2e-36, equal_nan=True)


@grid("kind,backend", CASES, dtype=FLOATS, bad=[torch.nan, torch.inf, -torch.inf], which=[0, 1])
def test_nan_and_inf_stay_where_they_are(kind, backend, dtype, bad, which):
    args = inputs((4, 70), dtype)
    args[which][2, 5] = bad
    compare(kind, backend, args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_of_the_kernels_own_operators(backend):
    """The kernel operators choose the composite themselves for float64."""
    gate, up = placed(inputs((3, 6), torch.float64), device_of(backend))
    options = ("swiglu", None, 1.0, 0.0)
    with fusedops.backend(backend):
        y = torch.ops.fusedops.gated_activation_forward(gate, up, *options)
        backward = torch.ops.fusedops.gated_activation_backward
        actual = backward(y, gate, up, *options, [True, True])
        packed = backward(y, torch.cat([gate, up], -1), None, *options, [True, False])[0]
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    expected = torch.nn.functional.silu(leaves[0]) * leaves[1]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(packed, torch.cat(actual, -1))
    expected = torch.autograd.grad(expected, leaves, y)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_what_models_write(kind):
    gate, up = inputs((3, 6), torch.float64)
    expected = {
        "swiglu": lambda: torch.nn.functional.silu(gate) * up,
        "swiglu limited": lambda: gpt_oss_lines(gate, up, **GPT_OSS),
        "geglu": lambda: torch.nn.functional.gelu(gate) * up,
        "geglu tanh": lambda: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    }[kind]()
    _, reference, kwargs = KINDS[kind]
    torch.testing.assert_close(reference(gate, up, **kwargs), expected)


def gpt_oss_lines(gate, up, limit, alpha, up_offset):
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + up_offset) * glu


LAYOUTS = {
    "transposed": lambda make: make(64, 12).t(),
    "slice of rows": lambda make: make(12, 96)[:, 3:67],
    "aligned slice of rows": lambda make: make(12, 96)[:, 16:80],
    "aligned rows that end odd": lambda make: make(12, 96)[:, 16:74],
    "half of a packed batch": lambda make: make(4, 3, 128)[..., 64:],
    "one row of each": lambda make: make(4, 3, 64)[:, :1],
    "every second column": lambda make: make(12, 128)[:, ::2],
    "expanded": lambda make: make(1, 64).expand(12, 64),
    "misaligned": lambda make: make(12 * 64 + 1)[1:].view(12, 64),
    "transposed batch": lambda make: make(4, 3, 64).transpose(0, 1),
}


@grid("kind,backend", CASES, layout=LAYOUTS, dtype=[torch.float32, torch.float16])
def test_strides(kind, backend, layout, dtype):
    def view():
        return LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype))

    compare(kind, backend, (view(), view()))
    compare(kind, backend, (view(), torch.randn(view().shape, dtype=dtype)))
    compare(kind, backend, (torch.randn(view().shape, dtype=dtype), view()))
    compare(kind, backend, (view(),))


@pytest.mark.parametrize("kind,backend", CASES)
@PACKED
def test_strided_output_gradients(kind, backend, packed):
    function, reference, kwargs = KINDS[kind]
    args = inputs((12, 64), torch.float32, packed)
    for view in (torch.t, lambda y: torch.cat([y, y.new_zeros(12, 5)], -1), lambda y: y.sum(0)):
        check(viewed(function, view), viewed(reference, view), args, backend, **kwargs)


@grid("kind,backend", CASES, which=[0, 1])
def test_only_one_gradient(kind, backend, which):
    *both, kwargs = KINDS[kind]
    runs = (with_gradients_of(run, which) for run in both)
    check(*runs, inputs((40, 33), torch.float32), backend, **kwargs)


@grid(
    pytest.mark.parametrize("n", [257, 264], ids=["element by element", "by vectors"]),
    "kind,backend",
    CASES,
    dtype=FLOATS,
)
def test_same_bits_each_time_and_whatever_the_rows(kind, backend, dtype, n):
    function, _, kwargs = KINDS[kind]
    args = placed(inputs((300, n), dtype), device_of(backend))
    with fusedops.backend(backend), threads(1):
        first = gradients(function, args, **kwargs)
        packed = function(torch.cat(args, -1), **kwargs)
        with threads(3):
            threaded = gradients(function, args, **kwargs)
        few = function(*(a[3:10] for a in args), **kwargs)
    assert all(torch.equal(value, threaded[key]) for key, value in first.items())
    assert torch.equal(few, first["output 0"][3:10])
    assert torch.equal(packed, first["output 0"])


def test_only_gate_and_up_are_kept():
    gate, up = (t.requires_grad_() for t in inputs((64, 64), torch.bfloat16))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        swiglu(gate, up)
        geglu(torch.cat([gate, up], -1).detach().requires_grad_())
    assert [tuple(t.shape) for t in kept] == [(64, 64), (64, 64), (64, 128)]
