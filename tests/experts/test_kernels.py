"""The `experts` function matches its reference on every backend."""

from functools import partial

import pytest
import torch
from axes import grid
from contract.wrapped import viewed, with_gradients_of
from torch.fx.experimental.proxy_tensor import make_fx

import fusedops
from experts.cases import (
    BACKENDS,
    CASES,
    DRAWS,
    FLOATS,
    KINDS,
    OURS,
    REFERENCE,
    Shape,
    compare,
    inputs,
    kernel_options,
)
from fusedops.testing import check, device_of, gradients, placed, poisoned, threads, yardstick

F64 = torch.float64

# Odd; more experts than choices, so that some get none; sentinels; many rows
# for an expert; few. Of rows that are longer than 64 the yardstick looks at each, and of the
# hundreds that weights' gradients have, sums of a few terms are luck.
SHAPES = [
    Shape(7, 2, 3, 33, 15, bias=True),
    Shape(5, 3, 40, 17, 31),
    Shape(30, 2, 4, 64, 21, bias=True, sentinels=True),
    Shape(160, 2, 3, 31, 60, sentinels=True),
    Shape(200, 4, 8, 48, 31, bias=True),
    Shape(350, 6, 7, 18, 11, bias=True, sentinels=True),  # several parts of experts
    Shape(75, 2, 2, 9, 5, bias=True),  # narrow rows of many tokens
]


@grid("kind,backend", CASES, dtype=FLOATS, shape=SHAPES)
def test_forward_and_gradients(kind, backend, dtype, shape):
    compare(kind, backend, inputs(shape, dtype, **KINDS[kind]))


FEW = [Shape(9, 3, 4, 10, 7, bias=True, sentinels=True), Shape(6, 2, 11, 8, 5)]


@grid(kind=KINDS, transformed=[False, True], shape=FEW)
def test_float64_is_exact(kind, shape, transformed):
    """No kernel has it: the definition runs, one product for each expert, or of all under vmap."""
    args = inputs(shape, F64, **KINDS[kind])
    expected = gradients(REFERENCE, args, **KINDS[kind])

    def mapped(hidden, *rest, **options):
        return torch.vmap(lambda x: OURS(x, *rest, **options))(hidden.unsqueeze(0))[0]

    actual = gradients(mapped if transformed else OURS, args, **KINDS[kind])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def compare_forward(kind, backend, args):
    options, args = KINDS[kind], placed(args, device_of(backend))
    with fusedops.backend(backend), torch.no_grad(), poisoned():
        actual = OURS(*args, **options)
    wide = (a.double() if a is not None and a.is_floating_point() else a for a in args)
    exact = REFERENCE(*wide, **options)
    eagers = (run(*args, **options) for run in (REFERENCE, *DRAWS))
    assert any(yardstick(actual, eager, exact) is None for eager in eagers), args[0].shape


# Past a task's columns, a block of the depth, a panel and a vector, for few rows and for many.
LONG = [
    Shape(5, 2, 3, 140, 70, bias=True),
    Shape(1, 2, 4, 300, 410),
    Shape(9, 4, 6, 270, 230, bias=True),
    Shape(150, 2, 3, 420, 130, sentinels=True),
]


@grid("kind,backend", CASES, dtype=FLOATS, shape=LONG)
def test_long_rows(kind, backend, dtype, shape):
    compare_forward(kind, backend, inputs(shape, dtype, **KINDS[kind]))


# Whole tiles of a matrix unit: a tile and two of w's rows, of x's rows and of columns; past a
# task's columns and rows, and a piece of the depth.
TILED = [
    Shape(3, 1, 2, 32, 32, bias=True),
    Shape(40, 2, 3, 96, 32, sentinels=True),
    Shape(20, 2, 3, 96, 24, bias=True),
    Shape(20, 2, 3, 48, 32, bias=True),
    Shape(70, 2, 2, 160, 96, bias=True),
    Shape(120, 2, 3, 288, 160),
    Shape(300, 2, 2, 64, 32, bias=True),
]


@grid("kind,backend", [c for c in CASES if c[0] in ("silu", "gelu_tanh transposed", "gpt_oss")])
@pytest.mark.parametrize("shape", TILED, ids=str)
def test_whole_tiles(kind, backend, shape):
    compare(kind, backend, inputs(shape, torch.bfloat16, **KINDS[kind]))


@grid(backend=BACKENDS)
def test_tiles_keep_a_nan_in_its_token_and_its_expert(backend):
    args = inputs(Shape(60, 2, 3, 64, 32), torch.bfloat16)
    with fusedops.backend(backend), torch.no_grad():
        clean = OURS(*placed(args, device_of(backend)))
        args[0][7, 3] = torch.nan
        out = OURS(*placed(args, device_of(backend)))
        others = torch.arange(60) != 7
        assert torch.equal(out[others], clean[others]) and out[7].isnan().all()
        args = inputs(Shape(60, 1, 3, 64, 32), torch.bfloat16)
        args[3][1, 5, 5] = torch.nan
        out = OURS(*placed(args, device_of(backend)))
    hit = args[1][:, 0] == 1
    assert out[hit].isnan().all() and out[~hit].isfinite().all()


@grid(backend=BACKENDS, dtype=FLOATS)
def test_every_number_of_rows(backend, dtype):
    for rows in range(1, 40):
        compare_forward("silu", backend, inputs(Shape(rows, 1, 1, 40, 26), dtype))


@grid(backend=BACKENDS, dtype=FLOATS)
def test_a_few_rows_of_transposed_weights(backend, dtype):
    """A row to more than the kernel for few takes; depths and columns past its steps."""
    kind = "gelu_tanh transposed"
    for rows in (1, 2, 3, 4, 5):
        for experts, hidden, inner in ((2, 37, 26), (2, 130, 70), (1, 37, 26)):
            shape = Shape(rows, 1, experts, hidden, inner, bias=True)
            compare_forward(kind, backend, inputs(shape, dtype, **KINDS[kind]))


@grid(backend=["cpu"])
def test_threads_share_a_few_rows_of_transposed_weights(backend):
    """Each thread has more than 512 columns of the first weight."""
    kind = "gelu_tanh transposed"
    args = inputs(Shape(2, 1, 1, 24, 700, bias=True), torch.bfloat16, **KINDS[kind])
    with threads(2):
        compare_forward(kind, backend, args)


@grid(backend=BACKENDS, dtype=[torch.bfloat16, torch.float16])
def test_weights_of_another_dtype(backend, dtype):
    """Routers often give float32 weights, whose gradients are float32 then."""
    for shape in (Shape(12, 2, 4, 40, 24, weights=torch.float32, bias=True),):
        compare("silu", backend, inputs(shape, dtype))


LAYOUTS = {  # of three dimensions, the last two as a matrix
    "slice of rows": lambda make, e, m, n: make(e, m, n + 7)[..., 3:-4],
    "every second column": lambda make, e, m, n: make(e, m, 2 * n)[..., ::2],
    "every second row": lambda make, e, m, n: make(e, 2 * m, n)[:, ::2],
    "matrices transposed": lambda make, e, m, n: make(e, n, m).transpose(1, 2),
    "experts last": lambda make, e, m, n: make(m, n, e).movedim(-1, 0),
    "one expert expanded": lambda make, e, m, n: make(1, m, n).expand(e, m, n),
    "misaligned": lambda make, e, m, n: make(e * m * n + 1)[1:].view(e, m, n),
}


@grid(
    backend=BACKENDS,
    layout=LAYOUTS,
    which=["gate_up", "down"],
    dtype=[torch.float32, torch.bfloat16],
)
def test_strides_of_weights(backend, layout, which, dtype):
    args = list(inputs(Shape(20, 2, 3, 45, 24, bias=True), dtype))
    place = {"gate_up": 3, "down": 4}[which]

    def make(*shape):
        return (torch.randn(shape) / 6).to(dtype)

    args[place] = LAYOUTS[layout](make, *args[place].shape)
    compare("silu", backend, tuple(args))


@grid(backend=BACKENDS, kind=["silu", "gpt_oss"])
def test_strides_of_the_rest(backend, kind):
    hidden, index, weights, *rest = inputs(Shape(20, 2, 3, 45, 24, bias=True), **KINDS[kind])
    *rest, first, second = rest
    args = (
        hidden.t().contiguous().t(),
        index.t().contiguous().t(),
        weights.repeat(1, 2)[:, ::2],
        *rest,
        first.repeat_interleave(2, 1)[:, ::2],
        second.t().contiguous().t(),
    )
    compare(kind, backend, args)


OUTPUTS = {  # what becomes of the output, hence its gradient's layout
    "transposed": lambda o: o.t().contiguous(),
    "slice of rows": lambda o: torch.cat([o, torch.zeros_like(o)], -1),
    "one row expanded": lambda o: o.sum(0),
}


@grid(backend=BACKENDS, layout=OUTPUTS)
def test_strided_output_gradients(backend, layout):
    runs = (viewed(run, OUTPUTS[layout]) for run in (OURS, REFERENCE))
    draws = tuple(viewed(run, OUTPUTS[layout]) for run in DRAWS)
    check(*runs, inputs(Shape(20, 2, 3, 45, 24)), backend, draws)


EMPTY = [Shape(0, 2, 3, 8, 4), Shape(3, 0, 3, 8, 4), Shape(3, 1, 2, 0, 4), Shape(3, 1, 2, 8, 0)]


@grid("kind,backend", CASES)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(kind, backend, shape):
    options = KINDS[kind]
    args = placed(inputs(shape, **options), device_of(backend))
    with fusedops.backend(backend), poisoned():
        grads = gradients(OURS, args, **options)
    torch.testing.assert_close(grads, gradients(REFERENCE, args, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_rows_of_no_expert_are_zeros(backend):
    shape = Shape(6, 2, 3, 20, 12, sentinels=True)
    args = placed(inputs(shape), device_of(backend))
    with fusedops.backend(backend), poisoned():
        z = torch.ops.fusedops.experts_forward(*args, *kernel_options("silu"), True)[1]
    rest = int((args[1] == shape.experts).sum())
    assert 0 < rest < len(z)
    assert z.isfinite().all() and z[:-rest].all() and not z[-rest:].any()


@grid(backend=BACKENDS, dtype=FLOATS)
def test_choices_of_no_expert(backend, dtype):
    """All of them: y and every gradient are zeros, whatever the weights are."""
    args = list(inputs(Shape(6, 2, 3, 20, 12, bias=True), dtype))
    args[1] = torch.full_like(args[1], 3)
    args[3] = args[3].fill_(torch.nan)
    with fusedops.backend(backend), poisoned():
        grads = gradients(OURS, placed(tuple(args), device_of(backend)))
    assert len(grads) == 7 and all((t == 0).all() for t in grads.values())


@grid(backend=BACKENDS, dtype=[torch.float32, torch.float64])
def test_weights_that_no_token_chose_have_gradients(backend, dtype):
    """Zeros, also if no other argument requires a gradient."""
    args = list(placed(inputs(Shape(4, 2, 3, 8, 4), dtype), device_of(backend)))
    args[1] = torch.full_like(args[1], 3)
    args[3:5] = (weight.requires_grad_() for weight in args[3:5])
    with fusedops.backend(backend):
        gradients_of_weights = torch.autograd.grad(OURS(*args).sum(), args[3:5])
    assert not any(gradient.any() for gradient in gradients_of_weights)


@grid(backend=BACKENDS)
def test_a_token_may_choose_an_expert_twice(backend):
    args = list(inputs(Shape(9, 3, 4, 20, 12, bias=True)))
    args[1] = args[1][:, :1].expand(-1, 3)
    compare("silu", backend, tuple(args))


@grid(backend=BACKENDS, dtype=FLOATS)
def test_an_expert_without_tokens_is_not_read(backend, dtype):
    """Its NaN reaches nothing, and its gradients are zeros."""
    args = inputs(Shape(8, 2, 5, 24, 16, bias=True), dtype)
    args[1][args[1] == 2] = 3
    for t in args[3:]:
        t[2] = torch.nan
    with fusedops.backend(backend), poisoned():
        grads = gradients(OURS, placed(args, device_of(backend)))
    assert all(t.isfinite().all() for t in grads.values())
    assert all((grads[f"gradient {i}"][2] == 0).all() for i in (2, 3, 4, 5))


@grid("kind,backend", CASES, bad=[float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_token(kind, backend, bad):
    for tokens in (6, 150):
        args = inputs(Shape(tokens, 2, 3, 40, 20, bias=True), **KINDS[kind])
        args[0][2, 5] = bad
        compare(kind, backend, args)


@grid(
    "kind,backend",
    [c for c in CASES if c[0] in ("silu", "gpt_oss")],
    dtype=FLOATS,
    tokens=[1, 10, 200],
)
def test_same_bits_each_time_and_whatever_the_threads(kind, backend, dtype, tokens):
    shape = Shape(tokens, 2, 4, 300, 170, bias=True)
    args = placed(inputs(shape, dtype, **KINDS[kind]), device_of(backend))
    with fusedops.backend(backend), threads(1):
        first = gradients(OURS, args, **KINDS[kind])
        again = gradients(OURS, args, **KINDS[kind])
        with threads(3):
            threaded = gradients(OURS, args, **KINDS[kind])
    for key, value in first.items():
        assert torch.equal(value, again[key])
        assert torch.equal(value, threaded[key]), key


WANTED = [[0], [1], [2], [3], [4], [5], [0, 1], [2, 5], [1, 3, 4]]


@grid("kind,backend", [c for c in CASES if c[0] in ("silu", "gpt_oss")], selected=WANTED)
def test_only_some_gradients(kind, backend, selected):
    places = [(0, 2, 3, 4, 5, 6)[i] for i in selected]
    runs = (with_gradients_of(run, *places) for run in (OURS, REFERENCE))
    draws = tuple(with_gradients_of(run, *places) for run in DRAWS)
    args = inputs(Shape(30, 2, 4, 33, 21, bias=True, sentinels=True), **KINDS[kind])
    check(*runs, args, backend, draws, **KINDS[kind])


@grid(kind=["silu", "gpt_oss"], tokens=[1, 8, 400])
def test_by_default_it_is_as_exact_too(kind, tokens):
    """Without a forced backend, a rule decides between our products and torch's."""
    for dtype in FLOATS:
        args = inputs(Shape(tokens, 2, 4, 300, 60), dtype, **KINDS[kind])
        with torch.no_grad():
            actual = OURS(*args, **KINDS[kind])
            eagers = [run(*args, **KINDS[kind]) for run in (REFERENCE, *DRAWS)]
            wide = (a.double() if a is not None and a.is_floating_point() else a for a in args)
            exact = REFERENCE(*wide, **KINDS[kind])
        assert any(yardstick(actual, eager, exact) is None for eager in eagers)


@grid(kind=["silu", "gpt_oss", "plain relu"], dtype=FLOATS, tokens=[8, 400])
def test_gradients_by_default(kind, dtype, tokens):
    """torch's products add the bias, and make the weights' gradients."""
    args = inputs(Shape(tokens, 2, 4, 64, 30, bias=True), dtype, **KINDS[kind])
    actual = gradients(OURS, args, **KINDS[kind])
    eagers = [gradients(run, args, **KINDS[kind]) for run in (REFERENCE, *DRAWS)]
    wide = tuple(a.double() if a.is_floating_point() else a for a in args)
    exact = gradients(REFERENCE, wide, **KINDS[kind])
    for key, value in actual.items():
        pairs = ((eager[key], exact[key]) for eager in eagers)
        assert any(yardstick(value, *pair) is None for pair in pairs), key


@pytest.mark.parametrize("tokens", [1, 40])
def test_an_expert_may_be_larger_than_float16(tokens):
    """Its routing weight makes it small enough."""
    half = partial(torch.full, dtype=torch.float16)
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    weights = half((1, 64, 1), 256.0), half((1, 1, 64), 8.0)
    y = fusedops.functional.experts(
        half((tokens, 1), 1.0), index, half((tokens, 1), 0.25), *weights,
        activation=None, gated=False,
    )  # fmt: skip
    assert (y == 32768).all()


def second_gradients(hidden, index, weights, gate_up, down):
    """Gradients of all inputs' first gradients."""
    inputs = hidden, weights, gate_up, down
    loss = OURS(hidden, index, weights, gate_up, down, None, None).sin().sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


def test_a_traced_double_backward():
    """A trace gives each expert a row for every token, with zeros for tokens that chose others."""
    args = inputs(Shape(9, 3, 4, 10, 7), F64)[:5]
    args = [a.requires_grad_() if a.is_floating_point() else a for a in args]
    traced = make_fx(second_gradients)(*args)
    others = [a.detach().requires_grad_() if a.is_floating_point() else a.flip(0) for a in args]
    torch.testing.assert_close(traced(*others), second_gradients(*others))


def test_a_transformed_call_keeps_nan_to_the_tokens_of_its_expert():
    """In results and gradients, though under vmap every expert multiplies every token."""
    args = inputs(Shape(9, 2, 4, 10, 7), F64)[:5]
    args[1][:5] = torch.tensor([0, 1])
    args[1][5:] = torch.tensor([2, 3])
    args[3][3] = args[4][3] = torch.nan
    hidden = args[0].requires_grad_()
    y = torch.vmap(lambda x: OURS(x, *args[1:], None, None))(hidden.unsqueeze(0))[0]
    (grad,) = torch.autograd.grad(y[:5].sum(), hidden)
    assert y[:5].isfinite().all() and y[5:].isnan().all()
    assert grad[:5].isfinite().all()


def test_a_transform_in_vmap_does_not_read_the_index():
    """The inner transform wraps the choices, which depend on its input, once more."""
    tokens, _, weights, gate_up, down = inputs(Shape(9, 2, 4, 10, 7), F64)[:5]

    def loss(x):
        index = x[:, :4].topk(2).indices
        return OURS(x, index, weights, gate_up, down, None, None).sin().sum()

    batch = torch.stack([tokens, tokens.flip(0)])
    each = torch.stack([torch.func.grad(loss)(x) for x in batch])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(batch), each)
