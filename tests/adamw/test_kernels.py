"""AdamW's operators match their references on every backend."""

import math

import pytest
import torch
from axes import grid

import fusedops
from adamw.cases import OPTIONS, check, step_of
from fusedops.references.adamw import (
    BLOCK,
    KINDS,
    NEAREST,
    REMAINDER,
    STOCHASTIC,
    adamw_step_reference,
    encoded,
)
from fusedops.testing import backends, device_of, threads

BACKENDS = backends("adamw_step")
# one element, odd, a vector and one more, whole blocks and a rest, two dimensions, none
SHAPES = [(1,), (7,), (17,), (256,), (3, 200), (1031,), (4, 1024), (0,), (5000,)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


MOMENTS = ["float32", "bfloat16", "int8"]
ROUNDINGS = [
    *[(dtype, NEAREST) for dtype in FLOATS],
    *[(dtype, STOCHASTIC) for dtype in FLOATS[1:]],
    (torch.bfloat16, REMAINDER),
]


@grid("dtype,rounding", ROUNDINGS, moments=MOMENTS)
def test_step(backend, dtype, moments, rounding):
    check(step_of(SHAPES, dtype, moments, rounding, backend=backend), backend)


@grid(
    moments=["float32", "int8"],
    options=[
        {"maximize": 1.0},
        {"amsgrad": 1.0},
        {"weight_decay": 0.0},
        {"lr": 0.0},
        {"beta1": 0.0},
        {"eps": 0.1},
        {"eps": 0.0},
        {"beta1": 0.99, "beta2": 0.95},
    ],
)
def test_options(backend, moments, options):
    check(step_of(SHAPES, torch.float32, moments, backend=backend, **options), backend)


@pytest.mark.parametrize("taken", [0, 1, 100000])
def test_bias_corrections(backend, taken):
    check(step_of([(33,)], taken=taken, backend=backend), backend)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
def test_large_steps_are_as_exact_as_small_ones(backend, moments):
    check(step_of([(6000,)], moments=moments, lr=100.0, backend=backend), backend)


def test_steps_and_groups_of_each_tensor(backend):
    step = step_of([(300,), (40,), (5,), (6,)], backend=backend)
    second = OPTIONS | {"lr": 0.5, "weight_decay": 0.0, "maximize": 1.0}
    step.options += second.values()
    step.kinds[KINDS] = 1
    step.steps[2].fill_(50.0)
    stepped = check(step, backend)
    assert [s.item() for s in stepped.steps] == [4, 4, 51, 4]


def test_more_groups_than_a_launch_knows(backend):
    step = step_of([(8,)] * 70, backend=backend)
    step.options = [x for i in range(70) for x in (OPTIONS | {"lr": 0.01 * i}).values()]
    for i in range(70):
        step.kinds[KINDS * i] = i
    check(step, backend)


@grid(
    "dtype,rounding",
    ROUNDINGS,
    moments=MOMENTS,
    shape=[(5, 384), (3, 100), (4, 1024), (7, 16), (2, 3, 300)],
)
def test_rows_of_blocks(backend, dtype, moments, rounding, shape):
    """A sharded tensor's blocks restart with each row; other shards come before it."""
    step = step_of([(3,), shape], dtype, moments, rounding, by_rows=True, backend=backend)
    check(step, backend)


def test_more_rows_than_a_launch_has_warps(backend):
    """The emulated GPU's launch has 96."""
    shape = (100, 300)
    check(
        step_of([shape], torch.bfloat16, "int8", STOCHASTIC, by_rows=True, backend=backend), backend
    )


def test_a_shard_is_as_its_part_of_the_whole(backend):
    whole = step_of([(6, 512)], torch.bfloat16, "int8", STOCHASTIC, backend=backend)
    stepped = whole.run(backend)
    for first, last in ((0, 4), (4, 6)):
        shard = whole.copy()
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
            setattr(shard, name, [t[first:last].contiguous() for t in getattr(shard, name)])
        shard.scales = [s[2 * first : 2 * last].contiguous() for s in shard.scales]
        shard.kinds[3:] = [512, 2 * first]
        part = shard.run(backend)
        for name in ("params", "exp_avgs", "exp_avg_sqs"):
            assert torch.equal(getattr(part, name)[0], getattr(stepped, name)[0][first:last]), name


def test_lr_on_the_device(backend):
    step = step_of([(33,)], backend=backend)
    expected = check(step, backend)
    step.options[0] = math.nan
    step.lrs = [torch.tensor(OPTIONS["lr"], device=device_of(backend))]
    actual = step.run(backend)
    torch.testing.assert_close(actual.params[0], expected.params[0])


LAYOUTS = {
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "rows with gaps": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
}


@grid("dtype,rounding", ROUNDINGS, moments=MOMENTS, layout=LAYOUTS)
def test_strides(backend, dtype, moments, rounding, layout):
    layout = LAYOUTS[layout]
    step = step_of([(20, 37)], dtype, moments, rounding, layout=layout, backend=backend)
    stepped = check(step, backend)
    p, before = stepped.params[0], step.params[0]
    assert p.stride() == before.stride()
    between = p.as_strided((p.untyped_storage().nbytes() // p.itemsize,), (1,), 0).clone()
    between.as_strided(p.shape, p.stride(), p.storage_offset()).copy_(before)
    assert torch.equal(between, before.as_strided(between.shape, (1,), 0))  # nothing beside it


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_transposed_gradient_of_a_contiguous_parameter(backend, moments):
    step = step_of([(20, 37)], moments=moments, backend=backend)
    step.grads[0] = step.grads[0].t().contiguous().t()
    check(step, backend)


@grid("dtype,rounding", ROUNDINGS, moments=MOMENTS, bad=[math.nan, math.inf, -math.inf, 1e30])
def test_an_element_that_is_not_finite_keeps_what_it_has(backend, dtype, moments, rounding, bad):
    if dtype == torch.float16 and bad == 1e30:
        bad = math.inf
    step = step_of([(600,)], dtype, moments, rounding, backend=backend)
    step.grads[0][300] = bad
    stepped = check(step, backend)
    if rounding != STOCHASTIC:  # which may round what was no more than that before
        assert torch.equal(stepped.params[0][300], step.params[0][300])
    if moments != "int8":
        assert torch.equal(stepped.exp_avgs[0][300], step.exp_avgs[0][300])
    assert stepped.params[0].isfinite().all()


@grid(limit=[0.01, 1e4], more=["grad_scale", "squares", "both"])
def test_scaling(backend, more, limit):
    step = step_of([(300,), (7,)], backend=backend)
    device = device_of(backend)
    if more != "squares":
        step.more["grad_scale"] = torch.tensor(64.0, device=device)
    if more != "grad_scale":
        with fusedops.backend(backend):
            step.more["squares"] = torch.ops.fusedops.adamw_squares(step.grads)
        step.more["max_grad_norm"] = limit
    check(step, backend)


@grid(
    "size,grad_scale",
    [(1e-3, 64.0), (3e18, 1.0), (1e-22, 1e-3), (1e17, 1e22), (1e-3, math.inf), (1e-3, 1e-38)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regular_or_not_a_block_of_codes_is_stepped_alike(backend, dtype, size, grad_scale):
    """Uses gradients and factors whose products overflow or underflow."""
    step = step_of([(600,)], dtype, "int8", backend=backend)
    step.grads[0].mul_(size / step.grads[0].abs().max())
    for t in (step.exp_avgs[0], step.exp_avg_sqs[0], *step.scales):
        t.zero_()  # beside which a square might not show
    step.more["grad_scale"] = torch.tensor(grad_scale, device=device_of(backend))
    check(step, backend)


@pytest.mark.parametrize("name", ["exp_avg_sqs", "max_exp_avg_sqs"])
def test_under_an_infinite_second_moment_a_parameter_decays(backend, name):
    step = step_of([(600,)], backend=backend, amsgrad=1.0)
    getattr(step, name)[0][300] = math.inf
    param = step.run(backend).params[0]
    assert param.isfinite().all()
    torch.testing.assert_close(param[300], step.params[0][300] * (1 - 1e-2 * 0.1))


def test_a_scale_that_is_no_number_stays_none(backend):
    step = step_of([(600,)], torch.bfloat16, "int8", STOCHASTIC, backend=backend)
    step.scales[0][1] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert step.run(backend).params[0][256:512].isnan().all()


@pytest.mark.parametrize("why", ["found_inf", "norm"])
def test_a_step_that_is_skipped_changes_nothing(backend, why):
    step = step_of([(300,), (7,)], moments="int8", backend=backend)
    if why == "found_inf":
        step.more["found_inf"] = torch.ones((), device=device_of(backend))
    else:
        step.grads[1][3] = math.nan
        with fusedops.backend(backend):
            step.more["squares"] = torch.ops.fusedops.adamw_squares(step.grads)
        step.more["max_grad_norm"] = 1.0
    stepped = step.run(backend)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "scales", "steps"):
        for before, after in zip(getattr(step, name), getattr(stepped, name), strict=True):
            assert torch.equal(before, after), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("eps", [1e-8, 1e-40, 1e-44])
def test_zeros(backend, eps, dtype):
    step = step_of([(300,)], dtype, "int8", backend=backend, eps=eps)
    for t in (step.grads[0], step.exp_avgs[0], step.exp_avg_sqs[0], *step.scales):
        t.zero_()
    stepped = step.run(backend)
    assert stepped.exp_avgs[0].count_nonzero() == 0
    assert all(scale.count_nonzero() == 0 for scale in stepped.scales)
    decayed = step.params[0].float() * (1 - 1e-2 * 0.1)
    assert torch.equal(stepped.params[0], decayed.to(dtype))


def test_zeros_beside_others(backend):
    step = step_of([(300,)], moments="int8", backend=backend)
    for t in (step.exp_avgs[0], step.exp_avg_sqs[0], *step.scales, step.grads[0][::2]):
        t.zero_()
    stepped = step.run(backend)
    for codes in (stepped.exp_avgs[0], stepped.exp_avg_sqs[0]):
        assert not codes[::2].any() and codes[1::2].any()


def test_an_eps_below_the_least_normal_number(backend):
    """float32 divides by it as it is. 16-bit floats may round it up."""
    step = step_of([(300,)], backend=backend, eps=1e-40)
    step.exp_avgs[0].mul_(1e-38)
    for t in (step.grads[0], step.exp_avg_sqs[0]):
        t.zero_()
    check(step, backend)


def test_the_largest_moments_have_the_last_codes(backend):
    """A root that is slightly off still gives the last code or the one before it."""
    step = step_of([(256 * 500,)], moments="int8", backend=backend)
    for t in (step.exp_avgs[0], step.exp_avg_sqs[0], *step.scales):
        t.zero_()
    sizes = (torch.rand(500, 1) + 0.1) * torch.tensor([1, -1]).repeat(128)
    step.grads[0].view(-1, 256).copy_(sizes)
    stepped = step.run(backend)
    assert set(stepped.exp_avgs[0].unique().tolist()) <= {-127, -126, 126, 127}
    assert stepped.exp_avg_sqs[0].min() >= 254


def test_a_table_that_is_kept_follows_the_tensors(backend):
    """Like in an optimizer, the gradients have new addresses in each step."""
    kept = {"host_table": torch.zeros(4096, dtype=torch.uint8)}
    kept["table"] = torch.zeros(4096, dtype=torch.uint8, device=device_of(backend))
    for shape in ((300,), (40, 30)):
        step = step_of([shape], backend=backend)
        expected = step.run(backend)
        step.more |= kept
        assert torch.equal(step.run(backend).params[0], expected.params[0])
        if backend in ("cuda", "simt"):  # an equal table is not copied to the device again
            written = kept["host_table"] != 0
            assert written.any()
            assert torch.equal(kept["table"].cpu()[written], kept["host_table"][written])


def test_same_bits_in_any_company(backend):
    """A tensor's step does not depend on other tensors or on the thread count."""
    alone = step_of([(5000,)], torch.bfloat16, "int8", STOCHASTIC, backend=backend)
    with_others = step_of([(5000,)], torch.bfloat16, "int8", STOCHASTIC, backend=backend)
    others = step_of([(777,)] * 5, torch.bfloat16, "int8", STOCHASTIC, backend=backend)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "scales"):
        getattr(with_others, name)[:0] = getattr(others, name)
    with_others.kinds[:0] = others.kinds
    by_itself = alone.run(backend)
    with threads(2):
        beside = with_others.run(backend)
    assert torch.equal(by_itself.params[0], beside.params[-1])
    assert torch.equal(by_itself.exp_avgs[0], beside.exp_avgs[-1])
    assert torch.equal(by_itself.exp_avg_sqs[0], beside.exp_avg_sqs[-1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares(backend, dtype):
    grads = [torch.randn(s, device=device_of(backend)).to(dtype) for s in SHAPES]
    grads.append(torch.randn(40, 30, device=device_of(backend)).to(dtype).t())
    grads.append(torch.randn(40, 30, device=device_of(backend)).to(dtype)[:, ::2])
    with fusedops.backend(backend):
        squares = torch.ops.fusedops.adamw_squares(grads)
    exact = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(squares.sum(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_of_many(backend, dtype):
    """Each part of the sum exceeds what a warp takes at a time or a CPU adds in float32."""
    sizes = [500_003, *[3000] * 30]
    grads = [torch.randn(n, device=device_of(backend)).to(dtype) for n in sizes]
    exact, first = sum(g.double().square().sum() for g in grads), grads[0][0].double()
    with fusedops.backend(backend):
        squares = torch.ops.fusedops.adamw_squares(grads)
        torch.ops.fusedops.adamw_scale(grads, squares, 1.0)
    torch.testing.assert_close(squares.sum(), exact, rtol=1e-6, atol=0)
    scaled = grads[0][0].double()
    torch.testing.assert_close(scaled, first / exact.sqrt(), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_of_runs_of_blocks(backend, dtype, offset):
    """A warp has several blocks under way, if the tensor and the part have so many.

    The numbers are small integers, so that every sum is exact.
    """
    sizes = [6_000_003, 300, 700_000, *(256 * k + 3 for k in range(20, 60))]
    device = device_of(backend)
    integers = (torch.randint(-2, 3, (n + offset,), device=device) for n in sizes)
    grads = [t.to(dtype)[offset:] for t in integers]
    with fusedops.backend(backend):
        squares = torch.ops.fusedops.adamw_squares(grads)
    assert squares.sum() == sum(g.double().square().sum() for g in grads)


def test_squares_of_other_gradients_than_before(backend):
    """A stream keeps its last table, which more gradients, or fewer, must not be taken for."""
    lists = [[torch.randn(300, device=device_of(backend)) for _ in range(n)] for n in (3, 2, 5, 3)]
    for grads in [lists[0], *lists]:
        with fusedops.backend(backend):
            total = torch.ops.fusedops.adamw_squares(grads).sum()
        exact = sum(g.double().square().sum() for g in grads)
        torch.testing.assert_close(total, exact, rtol=1e-6, atol=0)


@grid(dtype=FLOATS, max_norm=[0.5, 1e6])
def test_scale(backend, dtype, max_norm):
    grads = [torch.randn(s, device=device_of(backend)).to(dtype) for s in SHAPES]
    grads.append(torch.randn(40, 30, device=device_of(backend)).to(dtype).t())
    norm = math.sqrt(sum(g.double().square().sum() for g in grads))
    expected = [g.double() * min(1, max_norm / (norm + 1e-6)) for g in grads]
    with fusedops.backend(backend):
        squares = torch.ops.fusedops.adamw_squares(grads)
        torch.ops.fusedops.adamw_scale(grads, squares, max_norm)
    for g, w in zip(grads, expected, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_tiny_first_moments_have_codes_of_zero(backend):
    """Their scale has no reciprocal in float32."""
    step = step_of([(600,)], moments="int8", backend=backend)
    step.grads[0].zero_()
    step.scales[0].fill_(1e-33)
    stepped = step.run(backend)
    assert not stepped.exp_avgs[0].any()
    torch.testing.assert_close(stepped.params[0], step.params[0] * (1 - 1e-2 * 0.1))


def test_small_codes_are_the_references(backend):
    """Codes 0 to 3 of m, and 0 to 5 of v, where a small error of the encoding shows in many."""
    options = {"beta1": 0.0, "beta2": 0.0, "bounded": 0.0}
    step = step_of([(400 * BLOCK,)], moments="int8", backend=backend, **options)
    code = torch.empty(400 * BLOCK).uniform_(0.2, 3)
    code[::BLOCK] = 127
    step.grads[0].copy_((code / 127) ** 2)
    ours, reference = step.run(backend), step.copy()
    adamw_step_reference(*reference.arguments())
    for name in ("exp_avgs", "exp_avg_sqs"):
        off = (getattr(ours, name)[0].int() - getattr(reference, name)[0].int()).abs()
        assert off.max() <= 1 and (off > 0).double().mean() < 0.0005, name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_first_moments_stay_below_adams_bound(backend, dtype):
    """A first moment that constant betas cannot leave beside its second one is cut to the bound."""
    step = step_of([(5000,)], dtype, "int8", backend=backend)
    large = torch.arange(5000) % 3 == 0
    m, v = torch.randn(5000), torch.rand(5000) + 0.5
    v[large] *= 1e-8
    codes = encoded(m, v)
    for tensors, code in zip(
        (step.exp_avgs, step.exp_avg_sqs, step.scales[:1], step.scales[1:]), codes, strict=True
    ):
        tensors[0].copy_(code)
    step.grads[0].mul_(1e-5)
    before, kept, ours = step.copy(), step.copy(), step.run(backend)
    adamw_step_reference(*kept.arguments())
    moved, expected = (s.params[0].double() - before.params[0].double() for s in (ours, kept))
    rounding = torch.finfo(dtype).eps * before.params[0].double().abs().max()
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=float(rounding))
    off = (ours.exp_avgs[0].int() - kept.exp_avgs[0].int()).abs()
    assert off.max() <= 1 and (off > 0).double().mean() < 0.01
