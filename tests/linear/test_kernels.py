"""linear matches its reference on every backend."""

import pytest
import torch
from axes import grid
from contract.wrapped import viewed, with_gradients_of
from growth.peaks import peaks

import fusedops
from fusedops.functional import linear
from fusedops.references.linear import linear_reference
from fusedops.testing import check, device_of, gradients, placed, poisoned, threads, yardstick
from linear.cases import BACKENDS, CASES, FLOATS, KINDS, LAYOUTS, compare, inputs

# input, features. One element; odd; a vector; past a tile, a panel and a block, each way. Of rows
# that are longer than 64, which the yardstick looks at one by one, but not by much, the largest
# errors are luck; so are those of a weight's gradient where it sums over few rows.
SHAPES = [
    ((1, 1), 1),
    ((7, 33), 15),
    ((5,), 3),
    ((2, 3, 64), 48),
    ((15, 60), 33),
    ((160, 60), 1031),
    ((200, 600), 50),
    ((350, 31), 17),
]
FEW = [((1, 2100), 130), ((2, 1030), 75), ((6, 1500), 70), ((13, 600), 90), ((32, 1100), 68)]


@grid("kind,backend", CASES, "shape,features", SHAPES, dtype=FLOATS)
def test_forward_and_gradients(kind, backend, dtype, shape, features):
    compare(kind, backend, inputs(shape, features, dtype))


def compare_forward(kind, backend, args):
    args = placed(args, device_of(backend))
    with fusedops.backend(backend), torch.no_grad(), poisoned():
        actual = linear(*args, activation=kind)
    eager = linear_reference(*args, activation=kind)
    wide = (None if a is None else a.double() for a in args)
    complaint = yardstick(actual, eager, linear_reference(*wide, activation=kind))
    assert complaint is None, (complaint, args[0].shape)


@grid("kind,backend", CASES, "shape,features", FEW, dtype=FLOATS)
def test_a_few_rows(kind, backend, dtype, shape, features):
    """Past a piece of the depth, a task's columns, and the rows that are packed together."""
    for bias in (True, False):
        compare_forward(kind, backend, inputs(shape, features, dtype, bias))


@grid(dtype=FLOATS, rows=[1, 3, 100])
def test_the_activation_sees_the_rounded_product(dtype, rows):
    """As in torch, whose products and activations are two calls, also where there is no bias."""
    x, weight, _ = inputs((rows, 64), 64, dtype)
    with fusedops.backend("cpu"), torch.no_grad():
        actual = linear(x, weight, None, activation="gelu")
        product = linear(x, weight, None)
        expected = linear(product, torch.eye(64, dtype=dtype), None, activation="gelu")
    assert torch.equal(actual, expected)


@grid(backend=BACKENDS, dtype=FLOATS)
def test_every_number_of_few_rows(backend, dtype):
    for rows in range(1, 36):
        compare_forward(None, backend, inputs((rows, 70), 21, dtype))


@grid(backend=BACKENDS, dtype=FLOATS, rows=[1, 3])
def test_a_few_rows_by_a_long_weight(backend, dtype, rows):
    """Tasks of every width, and an x that stays in the first cache or does not."""
    for shape, features in [((rows, 20), 1103), ((rows, 40), 5003), ((rows, 5000), 70)]:
        compare_forward(None, backend, inputs(shape, features, dtype))


@grid(backend=BACKENDS, dtype=FLOATS, rows=[1, 2, 3, 9])
def test_a_few_rows_by_part_of_a_weight(backend, dtype, rows):
    """Its rows are apart, are all the same, or begin at any element."""
    x, weight, bias = inputs((rows, 90), 40, dtype)
    misaligned = weight.view(-1)[1:-89].view(-1, 90)
    for part in (weight[:, 3:-4], weight[::2], weight[:1].expand(40, 90), misaligned):
        compare_forward(None, backend, (x[:, : part.shape[1]], part, bias[: len(part)]))


@pytest.mark.parametrize("kind,backend", CASES)
def test_no_bias(kind, backend):
    for dtype in FLOATS:
        compare(kind, backend, inputs((9, 40), 35, dtype, bias=False))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape,features", [((200, 4096), 60), ((4096, 60), 50), ((70, 60), 4096)])
def test_long_sums_are_as_exact_as_torchs(backend, shape, features):
    """In y, dweight and dinput. One chain of 4096 terms has three times the error."""
    compare(None, backend, inputs(shape, features, torch.float32))


@grid(
    backend=BACKENDS,
    layout=LAYOUTS,
    which=["input", "weight"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_strides(backend, layout, which, dtype):
    x, weight, _ = inputs((20, 45), 37, dtype)
    bias = torch.randn(74, dtype=dtype)[::2]

    def make(*shape):
        return torch.randn(shape, dtype=dtype)

    if which == "input":
        x = LAYOUTS[layout](make, 20, 45)
    else:
        weight = LAYOUTS[layout](make, 37, 45)
    compare("silu", backend, (x, weight, bias))


OUTPUTS = {  # what becomes of the output, hence its gradient's layout
    "transposed": lambda o: o.t(),
    "slice of rows": lambda o: torch.cat([o, torch.zeros_like(o)], -1),
    "one row expanded": lambda o: o.sum(0),
    "one column expanded": lambda o: o.sum(-1),
}


@grid("kind,backend", [c for c in CASES if c[0] in (None, "gelu")], layout=OUTPUTS)
def test_strided_output_gradients(kind, backend, layout):
    runs = (viewed(run, OUTPUTS[layout]) for run in (linear, linear_reference))
    check(*runs, inputs((12, 64), 40, torch.float32), backend, activation=kind)


@pytest.mark.parametrize("kind,backend", CASES)
@pytest.mark.parametrize("shape,features", [((0, 8), 4), ((3, 0), 4), ((3, 8), 0), ((2, 0, 4), 3)])
def test_empty(kind, backend, shape, features):
    for bias in (True, False):
        args = placed(inputs(shape, features, torch.float32, bias), device_of(backend))
        with fusedops.backend(backend), poisoned():
            grads = gradients(linear, args, activation=kind)
        torch.testing.assert_close(grads, gradients(linear_reference, args, activation=kind))


@grid("kind,backend", CASES, bad=[float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(kind, backend, bad):
    for dtype in (torch.float32, torch.bfloat16):
        args = inputs((20, 70), 33, dtype)
        args[0][2, 5] = bad
        others = torch.nn.functional.linear(*args[:2])[[0, 1, *range(3, 20)]]
        if dtype == torch.bfloat16 and not others.isfinite().all():
            continue  # oneDNN's products in AMX, which are torch's and so ours, spread them
        compare(kind, backend, args)


@grid("kind,backend", [c for c in CASES if c[0]], dtype=FLOATS)
def test_each_value_of_the_activation(kind, backend, dtype):
    z = torch.cat([torch.linspace(-30, 30, 999), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4])])
    args = (z[:, None].to(dtype), torch.ones(1, 1, dtype=dtype), None)
    compare(kind, backend, args)


SHARED = [((200, 520), 500), ((40, 300), 1100)]
WANTED = [(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1) if i + j + k]


@grid("kind,backend", [c for c in CASES if c[0] in (None, "gelu")], needs_grad=WANTED)
def test_only_some_gradients(kind, backend, needs_grad):
    places = [i for i, needed in enumerate(needs_grad) if needed]
    runs = (with_gradients_of(run, *places) for run in (linear, linear_reference))
    check(*runs, inputs((40, 33), 21, torch.float32), backend, activation=kind)


# Threads take rows of the first product, and columns of the second.
@grid(
    "kind,backend", [c for c in CASES if c[0] in (None, "gelu")], "shape,out", SHARED, dtype=FLOATS
)
def test_same_bits_each_time_and_whatever_the_threads(kind, backend, shape, out, dtype):
    args = placed(inputs(shape, out, dtype), device_of(backend))
    with fusedops.backend(backend), threads(1):
        first = gradients(linear, args, activation=kind)
        again = gradients(linear, args, activation=kind)
        with threads(3):
            threaded = gradients(linear, args, activation=kind)
    for key, value in first.items():
        assert torch.equal(value, again[key])
        if dtype == torch.float32:  # 16-bit products are torch's
            assert torch.equal(value, threaded[key])


@grid("kind,backend", CASES, dtype=FLOATS, rows=[1, 6])
def test_a_few_rows_have_the_same_bits_whatever_the_threads(kind, backend, dtype, rows):
    args = placed(inputs((rows, 700), 2051, dtype), device_of(backend))
    with fusedops.backend(backend), torch.no_grad(), threads(1):
        first = linear(*args, activation=kind)
        with threads(3):
            assert torch.equal(first, linear(*args, activation=kind))


@grid(kind=KINDS, rows=[100, 500])
def test_by_default_it_is_as_exact_too(kind, rows):
    """Without a forced backend, the rule decides for forward and backward separately."""
    for dtype in FLOATS:
        args = inputs((rows, 300), 60, dtype)
        actual, eager = (
            gradients(run, args, activation=kind) for run in (linear, linear_reference)
        )
        exact = gradients(linear_reference, tuple(a.double() for a in args), activation=kind)
        for key, value in actual.items():
            assert yardstick(value, eager[key], exact[key]) is None


@grid(dtype=FLOATS)
def test_rows_beyond_what_the_scratch_memory_holds(dtype):
    """8064 rows of sums: in a forward the input's, in a weight's gradient the weight's."""
    x, weight, bias = inputs((8100, 40), 5, dtype)
    check(linear, linear_reference, (x, weight, bias), "cpu")
    check(linear, linear_reference, (x[:7].clone(), *inputs((7, 40), 8100, dtype)[1:]), "cpu")


@grid(rows=[1, 3, 100])
def test_a_bias_that_is_copied_when_written(rows):
    """It is only read, so torch must not be asked for a copy, which no thread could make."""
    x, weight, bias = inputs((rows, 512), 4096, torch.float32)
    for kind in (None, "relu"):
        expected = linear(x, weight, bias.clone(), activation=kind)
        assert torch.equal(linear(x, weight, torch._lazy_clone(bias), activation=kind), expected)


GROWTH = """
from fusedops import backend
from fusedops.functional import linear

x = torch.randn(16, 64).bfloat16()
weight = torch.randn(400_000, 64).bfloat16().requires_grad_()
dy = torch.ones(16, 400_000, dtype=torch.bfloat16)
with backend("cpu"):
    y = linear(x, weight)
    for _ in range(2):
        grow(lambda: torch.autograd.grad(y, weight, dy, retain_graph=True))
"""


def test_the_gradient_of_a_tall_weight_takes_little_more_memory_than_itself():
    (grown,) = peaks(GROWTH)
    assert grown < 1.5 * 400_000 * 64 * 2
