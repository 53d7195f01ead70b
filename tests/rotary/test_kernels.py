"""rotary_embedding matches its reference on every backend."""

import pytest
import torch
from axes import grid
from contract.wrapped import viewed, with_gradients_of

import fusedops
from fusedops.functional import rotary_embedding
from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import check, device_of, gradients, placed, threads
from rotary.cases import BACKENDS, FLOATS, LAYOUTS, compare, inputs, with_table

FUNCTIONS = rotary_embedding, rotary_embedding_reference
PAIRS = pytest.mark.parametrize("interleaved", LAYOUTS, ids=["halves", "interleaved"])

# heads of q and of k, positions, width, rotary: one pair, odd widths, partial, the models' widths,
# more positions than a block of them, more heads than a group, two tiles of lanes
SHAPES = [
    ((1, 1), 1, 2, 2),
    ((3, 2), 5, 33, 6),
    ((2, 2), 3, 35, 34),
    ((4, 2), 7, 64, 64),
    ((4, 4), 9, 80, 32),
    ((2, 1), 67, 96, 96),
    ((9, 1), 3, 128, 128),
    ((3, 7), 2, 208, 112),
    ((2, 1), 140, 32, 16),
]


@grid(PAIRS, backend=BACKENDS, dtype=FLOATS, shape=SHAPES)
def test_forward_and_gradients(backend, dtype, shape, interleaved):
    compare(backend, inputs(*shape, dtype), interleaved=interleaved)


@grid(backend=BACKENDS, which=["batch", "heads of q", "heads of k", "seq", "rotary", "width"])
def test_empty(backend, which):
    heads = 0 if which == "heads of q" else 3, 0 if which == "heads of k" else 2
    seq, width = 0 if which == "seq" else 5, 0 if which == "width" else 8
    rotary = 0 if which in ("rotary", "width") else 4
    args = inputs(heads, seq, width, rotary, batch=0 if which == "batch" else 2)
    compare(backend, args)
    compare(backend, args, interleaved=True)


@grid(PAIRS, backend=BACKENDS, dtype=FLOATS, table=FLOATS)
def test_a_table_in_another_dtype(backend, dtype, table, interleaved):
    for rotary in (64, 20):
        q, k, cos, sin = inputs((3, 2), 5, 64, rotary, dtype, table=table)
        compare(backend, (q, k, cos, sin), interleaved=interleaved)
        compare(backend, (q, k, cos.to(dtype), sin), interleaved=interleaved)
        compare(backend, (q, k, cos, sin.to(dtype)), interleaved=interleaved)


# A change of [2, 3, 6, 16] and a table [2, 6, 16]: q and k, the table, unsqueeze_dim.
FORMS = {
    "one table for the batch": (lambda x: x, lambda t: t[:1], 1),
    "one table, expanded": (lambda x: x, lambda t: t[:1].expand(2, 6, 16), 1),
    "no batch in the table": (lambda x: x, lambda t: t[0], 0),
    "one position for all": (lambda x: x, lambda t: t[:, :1], 1),
    "one row for all": (lambda x: x, lambda t: t[0, 0], 0),
    "heads last": (lambda x: x.transpose(1, 2), lambda t: t, 2),
    "heads last, from the end": (lambda x: x.transpose(1, 2), lambda t: t, -2),
    "heads last in memory too": (lambda x: x.transpose(1, 2).contiguous(), lambda t: t, 2),
    "heads first": (lambda x: x.transpose(0, 1), lambda t: t, 0),
    "heads first in memory too": (lambda x: x.transpose(0, 1).contiguous(), lambda t: t, 0),
    "from the end": (lambda x: x, lambda t: t, -3),
    "no batch": (lambda x: x[0], lambda t: t[0], 0),
    "no batch, heads last": (lambda x: x[0].transpose(0, 1), lambda t: t[0], 1),
    "one position": (lambda x: x[0, :, 0], lambda t: t[0, 0], 0),
    "one position, contiguous": (lambda x: x[0, :, 0].contiguous(), lambda t: t[0, 0], 0),
}


@grid(PAIRS, backend=BACKENDS, form=FORMS)
def test_forms(backend, form, interleaved):
    heads, table, dim = FORMS[form]
    q, k, *tables = inputs((3, 2), 6, 16)
    args = heads(q), heads(k), *map(table, tables)
    compare(backend, args, unsqueeze_dim=dim, interleaved=interleaved)


# [4, 6, 12, 64], seen so.
STRIDES = {
    "heads inside the sequence": lambda make: make(4, 12, 6, 64).transpose(1, 2),
    "part of a packed projection": lambda make: make(4, 12, 10, 64)[:, :, 2:8].transpose(1, 2),
    "part of a head": lambda make: make(4, 6, 12, 96)[..., 16:80],
    "misaligned part of a head": lambda make: make(4, 6, 12, 96)[..., 3:67],
    "batch inside": lambda make: make(6, 12, 4, 64).movedim(2, 0),
    "every second position": lambda make: make(4, 6, 24, 64)[:, :, ::2],
    "misaligned": lambda make: make(4 * 6 * 12 * 64 + 1)[1:].view(4, 6, 12, 64),
    "every second column": lambda make: make(4, 6, 12, 128)[..., ::2],
    "transposed": lambda make: make(4, 6, 64, 12).transpose(2, 3),
    "one head for all": lambda make: make(4, 1, 12, 64).expand(4, 6, 12, 64),
    "one element": lambda make: make(1).expand(4, 6, 12, 64),
    "backwards": lambda make: make(64, 12, 6, 4).permute(3, 2, 1, 0),
}


@grid(PAIRS, backend=BACKENDS, layout=STRIDES, dtype=[torch.float32, torch.float16])
def test_strides(backend, layout, dtype, interleaved):
    def view():
        return STRIDES[layout](lambda *shape: torch.randn(shape, dtype=dtype))

    usual, other, cos, sin = inputs((6, 6), 12, 64, dtype=dtype, batch=4)
    for q, k in ((view(), view()), (view(), other), (usual, view())):
        compare(backend, (q, k, cos, sin), interleaved=interleaved)


@grid(backend=BACKENDS, layout=STRIDES)
def test_strides_of_the_table(backend, layout):
    q, k, *_ = inputs((3, 2), 12, 64, batch=4)

    def view():
        return STRIDES[layout](lambda *shape: torch.randn(shape))[:, 2]

    compare(backend, (q, k, view(), view()))
    compare(backend, (q, k, view(), view().contiguous()), interleaved=True)
    compare(backend, (q, k, view().contiguous(), view()))


@pytest.mark.parametrize("backend", BACKENDS)
@PAIRS
def test_strided_output_gradients(backend, interleaved):
    q, k, *table = inputs((6, 3), 12, 64)
    table = placed(table, device_of(backend))
    for view in (
        lambda y: y.transpose(1, 2),
        lambda y: y.transpose(1, 2).flatten(2),
        lambda y: torch.cat([y, y.new_zeros(*y.shape[:-1], 5)], -1),
        lambda y: y.sum(0),
        lambda y: y.transpose(2, 3),
    ):
        runs = (with_table(run, *table, interleaved=interleaved) for run in FUNCTIONS)
        check(*(viewed(run, view) for run in runs), (q, k), backend)


@grid(backend=BACKENDS, which=[0, 1])
def test_only_one_gradient(backend, which):
    q, k, *table = inputs((4, 2), 5, 48)
    table = placed(table, device_of(backend))

    both = [with_table(run, *table) for run in FUNCTIONS]
    check(*(with_gradients_of(run, which) for run in both), (q, k), backend)
    check(*(lambda *args, run=run: run(*args)[which] for run in both), (q, k), backend)
    with fusedops.backend(backend):
        args = placed((q, k), device_of(backend))
        rotated = both[0](*(a.requires_grad_(i == which) for i, a in enumerate(args)))
    assert [y.requires_grad for y in rotated] == [which == 0, which == 1]


@grid(backend=BACKENDS, dtype=FLOATS)
def test_gradients_of_cos_and_sin(backend, dtype):
    for table in (dtype, torch.float32):
        args = inputs((4, 2), 5, 48, 32, dtype, table=table)
        check(rotary_embedding, rotary_embedding_reference, args, backend)
        check(rotary_embedding, rotary_embedding_reference, args, backend, interleaved=True)


@grid(PAIRS, backend=BACKENDS, dtype=FLOATS, bad=[torch.nan, torch.inf, -torch.inf], which=range(4))
def test_nan_and_inf_stay_in_their_pairs(backend, dtype, bad, which, interleaved):
    args = inputs((2, 2), 5, 24, 20, dtype)
    args[which].flatten(0, -2)[3, 5] = bad
    compare(backend, args, interleaved=interleaved)


@grid("rotary,width", [(0, 40), (8, 40), (32, 64), (6, 37)], backend=BACKENDS, dtype=FLOATS)
def test_what_is_not_rotated_keeps_its_bits(backend, dtype, rotary, width):
    """Including denormals and NaNs with a payload."""
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    q, k, cos, sin = inputs((3, 2), 5, width, rotary, dtype)
    for x in (q, k):
        rest = x.view(bits)[..., rotary:]
        rest.copy_(torch.randint(-(2**15), 2**15, rest.shape, dtype=bits))
    args = placed((q, k, cos, sin), device_of(backend))
    with fusedops.backend(backend):
        rotated = rotary_embedding(*args)
    for y, x in zip(rotated, args, strict=False):
        assert torch.equal(y.view(bits)[..., rotary:], x.view(bits)[..., rotary:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_of_the_kernels_own_operators(backend):
    """The kernel operators choose the composite themselves for float64."""
    *args, cos, sin = placed(inputs((3, 2), 5, 12, 8, torch.float64), device_of(backend))
    args = [a.transpose(1, 2).contiguous().transpose(1, 2) for a in args]
    with fusedops.backend(backend):
        rotated = torch.ops.fusedops.rotary_forward(*args, cos, sin, 1, False)
        options = 1, False, torch.float64
        back = torch.ops.fusedops.rotary_backward(*rotated, cos, sin, *options)
        alone = torch.ops.fusedops.rotary_backward(None, rotated[1], cos, sin, *options)
    leaves = [a.clone().requires_grad_() for a in args]
    expected = rotary_embedding_reference(*leaves, cos, sin)
    torch.testing.assert_close(rotated, expected, rtol=1e-12, atol=1e-12)
    assert all(y.stride() == x.stride() for y, x in zip(rotated, args, strict=True))
    expected = torch.autograd.grad(expected, leaves, rotated)
    torch.testing.assert_close(back, expected, rtol=1e-12, atol=1e-12)
    assert alone[0] is None and torch.equal(alone[1], back[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_kernel_takes_is_computed_all_the_same(backend):
    """As torch broadcasts it: five dimensions, q over the batch of cos, dtypes of their own."""
    q, k, cos, sin = inputs((3, 2), 5, 16, 12)
    compare(backend, (q.unsqueeze(1), k.unsqueeze(1), cos, sin))
    compare(backend, (torch.stack([q, -q]), torch.stack([k, q[:, :2]]), cos, sin))
    compare(backend, (q[:1], k[:1], cos, sin), interleaved=True)
    compare(backend, (q[:, :, :1], k, cos, sin))
    compare(backend, (q[:1], k, cos, sin))
    compare(backend, (q[0, 0, 0], k[0, 0, 0], cos[0, 0], sin[0, 0]), unsqueeze_dim=0)
    compare(backend, (q.half(), k, cos, sin))
    compare(backend, (q, k.bfloat16(), cos.half(), sin.half()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_another_width(backend):
    q, k, cos, sin = inputs((3, 2), 5, 48, 32)
    compare(backend, (q, k[..., :40], cos, sin))
    compare(backend, (q[..., :32].contiguous(), k, cos, sin), interleaved=True)


@grid(PAIRS, backend=BACKENDS, dtype=FLOATS, width=[64, 50])
def test_same_bits_each_time_and_whatever_the_rest(backend, dtype, width, interleaved):
    """Threads, positions, heads and strides change no bit."""
    args = placed(inputs((4, 2), 150, width, dtype=dtype), device_of(backend))
    q, k, cos, sin = args
    with fusedops.backend(backend), threads(1):
        run = with_table(rotary_embedding, cos, sin, interleaved=interleaved)
        first = gradients(run, (q, k))
        inside = run(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)))
        with threads(3):
            threaded = gradients(run, (q, k))
        at = slice(70, 81)
        table = cos[:, at], sin[:, at]
        few = rotary_embedding(q[:, 1:2, at], k[:, :, at], *table, interleaved=interleaved)
    assert all(torch.equal(value, threaded[key]) for key, value in first.items())
    assert torch.equal(inside[0], first["output 0"]) and torch.equal(inside[1], first["output 1"])
    assert torch.equal(few[0], first["output 0"][:, 1:2, at])
    assert torch.equal(few[1], first["output 1"][:, :, at])


@grid(backend=BACKENDS, seq=[1, 6], heads=[1, 2])
def test_memory_layout_is_kept_and_nothing_is_written_to(backend, seq, heads):
    q, k, cos, sin = placed(inputs((4, 2), seq, 48), device_of(backend))
    q, k = (x.transpose(1, heads).contiguous() for x in (q, k))
    for view in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        args = [view(x.detach()).requires_grad_() for x in (q, k)]
        kept = [x.detach().clone() for x in (*args, cos, sin)]
        with fusedops.backend(backend):
            rotated = rotary_embedding(*args, cos, sin, unsqueeze_dim=heads)
            cotangents = [torch.randn_like(y) for y in rotated]
            before = [c.clone() for c in cotangents]
            grads = torch.autograd.grad(rotated, args, cotangents)
        for x, y, g in zip(args, rotated, grads, strict=True):
            assert y.stride() == x.stride() == g.stride()
        assert all(map(torch.equal, (*args, cos, sin), kept))
        assert all(map(torch.equal, cotangents, before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_gives_dense_outputs(backend):
    packed = torch.randn(2, 7, 10, 32)
    q, k = packed[:, :, :6].transpose(1, 2), packed[:, :, 6:8].transpose(1, 2)
    *_, cos, sin = inputs((6, 2), 7, 32)
    args = placed((q, k, cos, sin), device_of(backend))
    with fusedops.backend(backend):
        rotated = rotary_embedding(*args)
    assert all(y.transpose(1, 2).is_contiguous() for y in rotated)


def test_only_cos_and_sin_are_kept():
    q, k, cos, sin = inputs((4, 2), 6, 48, 32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        rotary_embedding(q.requires_grad_(), k.requires_grad_(), cos, sin)
    assert [tuple(t.shape) for t in kept] == [(2, 6, 32)] * 2
