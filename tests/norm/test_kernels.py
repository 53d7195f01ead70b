"""The norm functions match their references on every backend."""

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted, rounds_right
from contract.wrapped import viewed, with_gradients_of

import fusedops
from fusedops.testing import check, device_of, gradients, placed, threads
from norm.cases import (
    ADDS,
    BACKENDS,
    CASES,
    FLOATS,
    FUNCTIONS,
    compare,
    inputs,
)

# one element, odd, 3-D, past a power of two, many short rows, one long row
SHAPES = [(1, 1), (7, 33), (2, 3, 1024), (3, 4099), (130, 5), (1, 70001)]


@grid("op,backend", CASES, dtype=FLOATS, shape=SHAPES, only=rounds_right)
def test_forward_and_gradients(op, backend, dtype, shape):
    compare(op, backend, inputs(op, shape, dtype))


@pytest.mark.parametrize("op,backend", CASES)
@pytest.mark.parametrize("shape", [(400, 513), (60, 1024)], ids=["ragged", "by vectors"])
def test_more_rows_than_are_added_at_a_time(op, backend, shape):
    compare(op, backend, inputs(op, shape, torch.float16))


ON_GPUS = [c for c in CASES if c[1] in ("simt", "cuda")]


@pytest.mark.parametrize("op,backend", [c for c in ON_GPUS if "add" not in c[0]])
def test_more_sums_than_are_added_at_a_time(op, backend):
    """The emulated GPU's 36 blocks leave a sum each, and 32 are added at a time."""
    compare(op, backend, inputs(op, (1600, 513), torch.float16))


@grid(
    "op,backend",
    [c for c in CASES if "rms" in c[0]],
    rounding=["torch", "llama"],
    offset=[0.0, 1.0],
    weight_dtype=FLOATS,
    only=rounds_right,
)
def test_roundings(op, backend, rounding, offset, weight_dtype):
    for dtype in FLOATS[: 2 if interpreted(backend) else 3]:
        args = inputs(op, (5, 200), dtype, weight_dtype)
        compare(op, backend, args, rounding=rounding, offset=offset)


@grid("op,backend", CASES, weight_dtype=FLOATS, dtype=FLOATS, only=rounds_right)
def test_weight_in_another_dtype(op, backend, dtype, weight_dtype):
    compare(op, backend, inputs(op, (9, 77), dtype, weight_dtype))


@grid(
    "op,backend",
    ADDS,
    dtype=FLOATS,
    residual_dtype=FLOATS,
    weight_dtype=[torch.float32, torch.bfloat16],
    only=rounds_right,
)
def test_residual_in_another_dtype(op, backend, dtype, residual_dtype, weight_dtype):
    compare(op, backend, inputs(op, (6, 90), dtype, weight_dtype, residual_dtype))


@pytest.mark.parametrize("op,backend", [c for c in CASES if "layer" in c[0]])
def test_bias_in_another_dtype_than_weight(op, backend):
    *args, bias, eps = inputs(op, (64, 40), torch.float32, torch.float16)
    compare(op, backend, (*args, bias.float(), eps))


@grid("op,backend", ADDS, dtype=FLOATS, p=[0.1, 0.5, 0.9], only=rounds_right)
def test_dropout(op, backend, dtype, p):
    for shape in [(3, 70), (2, 3, 1027)]:
        compare(op, backend, inputs(op, shape, dtype), dropout_p=p)


@grid("op,backend", [c for c in ADDS if c[1] != "triton"], dtype=FLOATS, n=[72, 1024, 8200, 16392])
def test_dropout_by_vectors(op, backend, dtype, n):
    """Rows that GPUs keep in registers: several per block, one per block, long, in parts."""
    compare(op, backend, inputs(op, (7, n), dtype), dropout_p=0.3)


@pytest.mark.parametrize("op,backend", [c for c in ADDS if c[1] != "triton"])
@pytest.mark.parametrize("n", [72, 8200], ids=["short", "long"])
def test_only_the_dropped_gradient(op, backend, n):
    args = inputs(op, (7, n), torch.bfloat16)
    runs = (with_gradients_of(run, 0) for run in FUNCTIONS[op])
    check(*runs, args, backend, dropout_p=0.3)


@pytest.mark.parametrize("op,backend", ADDS)
def test_dropping_everything_leaves_the_residual(op, backend):
    args = placed(inputs(op, (5, 70), torch.float32), device_of(backend))
    with fusedops.backend(backend):
        results = gradients(FUNCTIONS[op][0], args, dropout_p=1.0)
    assert torch.equal(results["output 1"], args[1])
    assert not results["gradient 0"].any() and results["gradient 1"].all()


@grid(
    "op,backend",
    [c for c in CASES if "rms" in c[0]],
    rounding=["torch", "llama"],
    offset=[0.0, 1.0],
    weight_dtype=FLOATS,
    only=rounds_right,
)
def test_rounds_where_the_reference_does(op, backend, rounding, offset, weight_dtype):
    """The yardstick does not detect a missing rounding, but the bits do.

    A sum in another order may flip one rounding in 10,000 in bfloat16; a wrong rounding flips
    one in 4.
    """
    dtype = torch.float16 if weight_dtype == torch.float32 else weight_dtype
    args = placed(inputs(op, (50, 1000), dtype, weight_dtype), device_of(backend))
    function, reference = FUNCTIONS[op]
    with fusedops.backend(backend):
        actual = function(*args, rounding=rounding, offset=offset)
    expected = reference(*args, rounding=rounding, offset=offset)
    if "add" in op:
        actual, expected = actual[0], expected[0]
    assert actual.dtype == expected.dtype
    # beside a float32 weight a flip shows as a difference larger than float32's own noise
    differs = (actual - expected).abs() > 4e-7 * expected.abs()
    # the more steps, the more flips
    finer = torch.finfo(torch.bfloat16).eps / torch.finfo(dtype).eps
    assert differs.sum() <= actual.numel() * finer / 10_000


LAYOUTS = {
    "transposed": lambda make: make(64, 12).t(),
    "slice of rows": lambda make: make(12, 96)[:, 3:67],
    "start of rows": lambda make: make(12, 64)[:, :61],
    "every second column": lambda make: make(12, 128)[:, ::2],
    "expanded": lambda make: make(1, 64).expand(12, 64),
    "misaligned": lambda make: make(12 * 64 + 1)[1:].view(12, 64),
    "transposed batch": lambda make: make(4, 3, 64).transpose(0, 1),
}


@grid("op,backend", CASES, layout=LAYOUTS, dtype=[torch.float32, torch.float16])
def test_strides(op, backend, layout, dtype):
    def view():
        return LAYOUTS[layout](lambda *shape: torch.randn(shape, dtype=dtype))

    n = LAYOUTS[layout](torch.empty).shape[-1]
    other = view() if "add" in op else (n,)
    parameters = [torch.randn(2 * n, dtype=dtype)[::2] for _ in range(1 + ("layer" in op))]
    compare(op, backend, (view(), other, *parameters, 1e-6))


OUTPUTS = {  # what becomes of an output, hence its gradient's layout
    "transposed": lambda o: o.t(),
    "slice of rows": lambda o: torch.cat([o, torch.zeros_like(o)], -1),
}


@grid("op,backend", CASES, layout=OUTPUTS)
def test_strided_output_gradients(op, backend, layout):
    runs = (viewed(run, OUTPUTS[layout]) for run in FUNCTIONS[op])
    check(*runs, inputs(op, (12, 64), torch.float16), backend)


@grid("op,backend", CASES, shape=[(0, 8), (3, 0), (0, 0), (2, 0, 4)])
def test_empty(op, backend, shape):
    compare(op, backend, inputs(op, shape, torch.float32))


@pytest.mark.parametrize("op,backend", CASES)
def test_several_normalised_dimensions(op, backend):
    x, residual = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    parameters = [torch.randn(5, 6) for _ in range(1 + ("layer" in op))]
    compare(op, backend, (x, residual if "add" in op else (5, 6), *parameters, 1e-6))


@grid("op,backend", CASES, bad=[float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(op, backend, bad):
    args = inputs(op, (4, 70), torch.float32)
    args[0][2, 5] = bad
    compare(op, backend, args)


@pytest.mark.parametrize("op,backend", [c for c in ADDS if c[1] != "triton"])
def test_rows_that_fill_shared_memory(op, backend):
    """float32 rows of 227 KiB, of x in another dtype."""
    compare(op, backend, inputs(op, (2, 58112), torch.float16, torch.float32, torch.float32))


# The backward keeps such rows in registers and their sums in shared memory: rows of 16 to 32 KiB.
# The first length leaves most threads without a third and fourth vector.
LONG_HELD = {
    torch.float32: [4100, 8192],
    torch.float16: [8200, 16384],
    torch.bfloat16: [8200, 16384],
}
NOT_INTERPRETED = [c for c in CASES if c[1] != "triton"]


@grid("op,backend", NOT_INTERPRETED, dtype=FLOATS, which=[0, 1])
def test_rows_whose_sums_are_in_shared_memory(op, backend, dtype, which):
    compare(op, backend, inputs(op, (7, LONG_HELD[dtype][which]), dtype))


def has_them(op, places, **_):
    return "layer" in op or places != (3,)  # the bias


@grid("op,backend", NOT_INTERPRETED, places=[(0,), (2,), (3,), (2, 3)], only=has_them)
def test_some_gradients_of_long_rows(op, backend, places):
    args = inputs(op, (4, LONG_HELD[torch.float16][0]), torch.float16)
    tensors = [i for i in places if i < len(args) and isinstance(args[i], torch.Tensor)]
    runs = (with_gradients_of(run, *tensors) for run in FUNCTIONS[op])
    check(*runs, args, backend)


# The forward cuts longer rows into parts. The last part has two vectors.
PARTS = {torch.float32: 2 * 8192 + 8, torch.float16: 16384 + 16, torch.bfloat16: 16384 + 16}


@grid("op,backend", NOT_INTERPRETED, dtype=FLOATS)
def test_parts_of_a_row(op, backend, dtype):
    """The rows have another stride than their length."""
    args = list(inputs(op, (3, PARTS[dtype]), dtype))
    for i in range(1 + ("add" in op)):
        args[i] = torch.cat([args[i], args[i][:, :8]], 1)[:, :-8]
    compare(op, backend, args)


@pytest.mark.parametrize("op,backend", NOT_INTERPRETED)
def test_parts_with_means_of_their_own(op, backend):
    args = inputs(op, (3, PARTS[torch.float32]), torch.float32)
    args[0][:, :8192] += 1e3
    args[0][:, 8192:] -= 2e3
    args[0][1, -3] = float("inf")
    compare(op, backend, args)


@pytest.mark.parametrize("op,backend", CASES)
def test_large_mean_keeps_its_variance(op, backend):
    args = inputs(op, (3, 1000), torch.float32)
    args[0].add_(1e4)
    compare(op, backend, args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mean_is_not_rounded(backend):
    """A float32 mean is off by up to 5e-4 here; eager's results are off by as much or more."""
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)) + 1e4
    exact = torch.nn.functional.layer_norm(x.double(), (1000,))
    with fusedops.backend(backend):
        actual = FUNCTIONS["layer_norm"][0](x.to(device_of(backend)), (1000,))
    torch.testing.assert_close(actual.cpu().double(), exact, rtol=0, atol=2e-6)


def is_a_tensor(op, which, **_):
    return which < 2 + ("add" in op) + ("layer" in op)


@grid("op,backend", CASES, which=range(4), only=is_a_tensor)
def test_only_one_gradient(op, backend, which):
    args = inputs(op, (40, 33), torch.float32)
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    runs = (with_gradients_of(run, tensors[which]) for run in FUNCTIONS[op])
    check(*runs, args, backend)


@grid("op,backend", ADDS, used=[0, 1])
def test_unused_output(op, backend, used):
    function, reference = FUNCTIONS[op]
    args = inputs(op, (5, 33), torch.float32)
    check(lambda *a: function(*a)[used], lambda *a: reference(*a)[used], args, backend)


@grid(
    pytest.mark.parametrize("n", [257, 264], ids=["element by element", "by vectors"]),
    "op,backend",
    CASES,
    dtype=FLOATS,
)
def test_same_bits_each_time_and_whatever_the_rows(op, backend, dtype, n):
    function, _ = FUNCTIONS[op]
    rows = 20 if interpreted(backend) else 300
    args = placed(inputs(op, (rows, n), dtype), device_of(backend))
    with fusedops.backend(backend), threads(1):
        first, again = gradients(function, args), gradients(function, args)
        with threads(3):
            threaded = gradients(function, args)
        few = tuple(a[:7] if isinstance(a, torch.Tensor) and a.dim() == 2 else a for a in args)
        few = gradients(function, few)
    for key, value in first.items():
        assert torch.equal(value, again[key]) and torch.equal(value, threaded[key])
        if key.startswith("output"):
            assert torch.equal(few[key], value[:7])


@pytest.mark.parametrize("op,backend", ADDS)
def test_dropout_follows_manual_seed_and_keeps_its_share(op, backend):
    x = torch.ones(20 if interpreted(backend) else 400, 500, device=device_of(backend))

    def draw(seed):
        torch.manual_seed(seed)
        with fusedops.backend(backend):
            return FUNCTIONS[op][0](x, torch.zeros_like(x), dropout_p=0.3)[1]

    kept = draw(1)
    assert torch.equal(kept, draw(1)) and not torch.equal(kept, draw(2))
    assert torch.equal(kept.unique().cpu(), torch.tensor([0, 1 / 0.7]))
    share = (kept == 0).double().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / x.numel()) ** 0.5  # five standard deviations


@pytest.mark.parametrize("op,backend", ADDS)
def test_checkpoint_runs_the_same_mask_in_backward(op, backend):
    x = torch.randn(20, 64, device=device_of(backend), requires_grad=True)

    def h_of(x):
        return FUNCTIONS[op][0](x, x * 0, dropout_p=0.5)[1]

    with fusedops.backend(backend):
        h = torch.utils.checkpoint.checkpoint(h_of, x, use_reentrant=False)
        (dx,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(dx != 0, h != 0)


@grid(backend=BACKENDS, dtype=[torch.bfloat16], only=rounds_right)
def test_gradient_in_the_other_dtype_of_16_bits(backend, dtype):
    """Only the kernel operator accepts it; public operators never pass it."""
    device = device_of(backend)
    x = torch.randn(64, 40, dtype=dtype, device=device)
    dy = torch.randn(64, 40, dtype=torch.float16, device=device)

    def dx(dy):
        mask = [False, True, False, False]
        with fusedops.backend(backend):
            options = (1, 1e-5, "layer", 0.0, 0.0, None)
            _, _, stats = torch.ops.fusedops.norm_forward(x, None, None, None, *options)
            backward = torch.ops.fusedops.norm_backward
            return backward(dy, None, x, None, None, stats, *options, mask)[1]

    assert torch.equal(dx(dy), dx(dy.float()))
