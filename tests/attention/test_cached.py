"""attention over a cache, paged or not, matches its reference on every backend."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from axes import grid
from contract.interpreter import interpreted
from growth.peaks import peaks

import fusedops
from attention.cached import dense, packed, paged
from attention.cases import BACKENDS, F32, FLOATS, ON, by_heads, drawn, on, orders, runs
from fusedops.functional import attention
from fusedops.references.attention import attention_reference, cached_attention_reference
from fusedops.testing import poisoned, threads, yardstick

SIZES = [1, 16, 17, 256]
USED = (0, 1, 33, 330)  # keys of four sequences: none, one, odd, past LEAST_SPLIT
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "softcap": {"softcap": 2.0, "causal": True},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": drawn(8, 4), "window": (40, 0)},
}
CPU = pytest.mark.skipif("cpu" not in BACKENDS, reason="no kernel on this CPU")


def compare(case, backend, **options):
    """Checks out and lse by the yardstick, whose rows are heads."""
    options = {k: on(backend, t)[0] if k == "sinks" else t for k, t in options.items()}
    case = case.on(backend)
    with fusedops.backend(backend), poisoned(), torch.no_grad():
        actual = case.call(**options)
    sinks = {"sinks": options["sinks"].double()} if "sinks" in options else {}
    exact = case.double().reference(**options | sinks)
    left = [0, 1]
    for order in chain([slice(None)], orders(case.q)):
        eager = case.reference(order, **options)
        wrong = {i: yardstick(*(by_heads(t[i]) for t in (actual, eager, exact))) for i in left}
        left = [i for i in left if wrong[i]]
        if not left:
            return actual
    raise AssertionError(wrong)


@grid(ON, FLOATS, size=SIZES, queries=[1, 70], only=runs)
def test_pages(backend, dtype, products, size, queries):
    out, lse = compare(paged(queries, USED, size, dtype=dtype), backend, causal=True)
    assert not out[0].count_nonzero() and (lse[0] == -torch.inf).all()


@grid(ON, FLOATS, queries=[1, 70], only=runs)
def test_a_cache_without_pages(backend, dtype, products, queries):
    compare(dense(queries, USED, dtype=dtype), backend, causal=True)


@grid(ON, queries=[2, 70], options=OPTIONS)
def test_options(backend, queries, options):
    compare(paged(queries, USED, 17), backend, **OPTIONS[options])
    compare(dense(queries, USED), backend, **OPTIONS[options])


@grid(ON, FLOATS, size=[None, 17], options=["causal", "window"], only=runs)
def test_packed_queries(backend, dtype, products, size, options):
    """A mixed batch: a step of each of two sequences, a prompt, and a sequence without queries."""
    used = (90, 7, 80, 40)
    case = dense(1, used, dtype=dtype) if size is None else paged(1, used, size, dtype=dtype)
    out, _ = compare(packed(case, (1, 1, 70, 0)), backend, **OPTIONS[options])
    assert not out[72:].count_nonzero()


@ON
@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_a_token_past_the_last_sequence_has_no_sink(backend, dtype):
    case = packed(paged(1, (90, 7, 80, 40), 17, dtype=dtype), (1, 1, 2, 0)).on(backend)
    for name in (backend, "reference"):
        with fusedops.backend(name), torch.no_grad():
            _, lse = case.call(sinks=on(backend, drawn(8, 4))[0])
        assert lse[:, 4:].eq(-torch.inf).all() and not lse[:, :4].isinf().any()


def runs_in_time(backend, queries, **_):
    return not interpreted(backend) or queries <= 3


@grid(ON, heads=[(1, 1), (6, 2)], width=[8, 31, 160], queries=[1, 40], only=runs_in_time)
def test_shapes(backend, heads, width, queries):
    case = paged(queries, (70, 5), 16, heads=heads, width=width, v_width=width + 9)
    compare(case, backend, causal=True)


@CPU
@grid(FLOATS, size=SIZES, queries=[1, 5, 70], options=["plain", "causal", "window"])
def test_bits_are_those_of_each_sequence_alone(dtype, products, size, queries, options):
    case = paged(queries, (1, 600, 1300), size, heads=(8, 2), dtype=dtype)
    with torch.no_grad():
        out, lse = case.call(**OPTIONS[options])
        for b in range(3):
            alone = attention(*case.alone(b), return_lse=True, **OPTIONS[options])
            assert torch.equal(out[b], alone[0][0]) and torch.equal(lse[b], alone[1][0])


@CPU
@grid(size=[None, 16])
def test_threads_change_nothing(size):
    used = (1, 1500, 700)
    case = dense(1, used) if size is None else paged(1, used, size)
    mixed = packed(case, (1, 90, 3))
    with torch.no_grad():
        for each in (case, mixed):
            with threads(1):
                alone = each.call(causal=True)
            with threads(3):
                together = each.call(causal=True)
            assert all(map(torch.equal, alone, together))


@grid(ON, size=[None, 16], queries=[1, 70], width=[0, 1])
def test_values_of_no_width(backend, size, queries, width):
    """lse is what it is with values."""
    options = {"v_width": width}
    if size is None:
        case = dense(queries, (40, 3), **options)
    else:
        case = paged(queries, (40, 3), size, **options)
    compare(case, backend, causal=True)


@ON
def test_two_swapped_pages_of_one_key_each(backend):
    """All other keys are at equal distances."""
    case = paged(1, (40,), 1)
    table = torch.arange(40, dtype=case.block_table.dtype)
    table[5], table[6] = 6, 5
    k, v = drawn(2, *case.k.shape), drawn(3, *case.v.shape)
    out, _ = compare(replace(case, k=k, v=v, block_table=table[None]), backend)
    assert out.isfinite().all()


@ON
def test_sequences_share_pages(backend):
    """A common prefix: the first two pages of both."""
    case = paged(2, (40, 37), 16)
    table = case.block_table.clone()
    table[1, :2] = table[0, :2]
    case = replace(case, block_table=table)
    out, _ = compare(case, backend, causal=True)
    alone = attention_reference(*case.alone(1), causal=True)[0]
    torch.testing.assert_close(out[1:].cpu(), alone, rtol=1e-5, atol=1e-5)


@ON
def test_strides(backend):
    """A slice of a larger cache, transposed numbers, a column of a table, and int64."""
    case = paged(2, (40, 37), 16)
    want, _ = case.reference()
    width = case.k.shape[-1]
    k = torch.cat([case.k, case.k], -1)[..., :width]
    v = case.v.transpose(1, 3).contiguous().transpose(1, 3)
    table = torch.stack([case.block_table.long()] * 3, -1)[..., 1]
    used = torch.stack([case.seqused_k.long()] * 2, -1)[..., 0]
    case = replace(case, k=k, v=v, block_table=table, seqused_k=used).on(backend)
    with fusedops.backend(backend), torch.no_grad():
        out, _ = case.call()
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-5)


@ON
@grid(size=[None, 16])
def test_no_sequences_keys_or_pages(backend, size):
    """None raises, and what there is to return is 0."""
    for case in (
        dense(0, (3, 4)) if size is None else paged(0, (3, 4), size),
        dense(2, (0, 0), room=0) if size is None else paged(2, (0, 0), size),
        dense(2, (0, 0)) if size is None else replace(
            paged(2, (0, 0), size), k=torch.empty(0, size, 2, 24), v=torch.empty(0, size, 2, 24)),
    ):  # fmt: skip
        case = case.on(backend)
        with fusedops.backend(backend), poisoned():
            out, lse = case.call(causal=True)
        assert out.shape == case.q.shape and not out.count_nonzero()
        assert (lse == -torch.inf).all()
    nothing = dense(1, (3, 4)).on(backend)
    nothing = replace(nothing, q=nothing.q[:0], k=nothing.k[:0], v=nothing.v[:0],
                      seqused_k=nothing.seqused_k[:0])  # fmt: skip
    with fusedops.backend(backend):
        assert nothing.call()[0].shape == (0, 4, 1, 24)


@grid(size=[None, 1, 17], queries=[1, 9], is_packed=[False, True])
def test_gradients(size, queries, is_packed):
    """They come from the definition. Pages' unused places get none, not even NaN."""
    used = (0, 5, 30)
    case = dense(queries, used) if size is None else paged(queries, used, size)
    case = packed(case, (1, queries, 2)) if is_packed else case
    case = case.double()
    names, grads = ("q", "k", "v"), []
    for run in ("call", "reference"):
        leaves = {name: getattr(case, name).clone().requires_grad_() for name in names}
        out, lse = getattr(replace(case, **leaves), run)(causal=True)
        lse = torch.where(lse.isfinite(), lse, 0)
        grads.append(torch.autograd.grad(out.sin().sum() + lse.sum(), list(leaves.values())))
        assert all(g.isfinite().all() for g in grads[-1])
    torch.testing.assert_close(*grads)


@grid(size=[None, 16], is_packed=[False, True])
def test_compile(size, is_packed):
    case = dense(2, (5, 30)) if size is None else paged(2, (5, 30), size)
    case = packed(case, (1, 4)) if is_packed else case
    run = lambda case: case.call(causal=True)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(case), run(case))


def test_autocast():
    case = paged(2, (5, 30), 16)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, lse = case.call()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), case.reference()[0], rtol=0.03, atol=0.03)


def test_meta():
    case = packed(paged(1, (5, 30), 16), (1, 4))
    tensors = {name: t.to("meta") for name, t in vars(case).items()}
    out, lse = replace(case, **tensors).call()
    assert out.shape == (7, 4, 24) and lse.shape == (4, 7) and out.is_meta and lse.is_meta


GROWTH = """
from fusedops.functional import attention

for pages in map(int, sys.argv[1:]):
    cache = torch.ones(pages, 16, 2, 64)
    table = torch.arange(pages, dtype=torch.int32)[None]
    used = torch.tensor([16 * pages], dtype=torch.int32)
    for queries in (1, 80):
        q = torch.ones(1, 2, queries, 64)
        grow(lambda: attention(q, cache, cache, block_table=table, seqused_k=used))
"""


@CPU
def test_memory_is_not_that_of_the_cache():
    """A step needs no copy; a prompt packs the keys of one head at a time, here half of k and v."""
    _, step, prompt = peaks(GROWTH, "16", "4096")[-3:]
    cache = 2 * 4096 * 16 * 2 * 64 * 4
    assert step < cache / 16
    assert prompt < 0.8 * cache


MIXED = """
from fusedops.functional import attention

for pages in map(int, sys.argv[1:]):
    cache = torch.ones(pages, 16, 2, 64)
    table = torch.arange(pages).expand(64, -1)
    used = torch.full((64,), 16)
    used[0] = 16 * pages
    q = torch.ones(64, 16, 1, 64)
    grow(lambda: attention(q, cache, cache, block_table=table, seqused_k=used))
"""


@CPU
def test_a_long_sequence_makes_no_room_in_short_ones():
    """Each sequence has sums of its own keys' parts, not of the longest sequence's."""
    step = peaks(MIXED, "16", "4096")[-1]
    assert step < 2 * 4096 * 16 * 2 * 64 * 4 / 12


WRONG = {
    r"block_table needs seqused_k": {"seqused_k": None},
    r"k must be \[blocks, block_size, heads, width\] of q's dtype and width, .*"
    r", got float32 \[8, 16, 2, 23\]": {"k": torch.zeros(8, 16, 2, 23)},
    r"v must have k's shape except for the width, float32 \[8, 16, 2, 24\], got float32 "
    r"\[8, 17, 2, 24\]": {"v": torch.zeros(8, 17, 2, 24)},
    r"k's heads must divide q's, 4, got 3": {
        "k": torch.zeros(8, 16, 3, 24), "v": torch.zeros(8, 16, 3, 24),
    },
    r"seqused_k must be int32 or int64 \[sequences\], got float32 \[2\]": {
        "seqused_k": torch.ones(2),
    },
    r"seqused_k must be one number per batch entry of q, \[2\], got int32 \[3\]": {
        "seqused_k": torch.ones(3, dtype=torch.int32),
    },
    r"seqused_k must be from 0 to 48, .* got 49 at index 1": {"seqused_k": torch.tensor([1, 49])},
    r"block_table must be int32 or int64 \[sequences, blocks\], got int16 \[2, 3\]": {
        "block_table": torch.zeros(2, 3, dtype=torch.int16),
    },
    r"block_table must have a row for each of the 2 sequences .* got int64 \[1, 3\]": {
        "block_table": torch.zeros(1, 3, dtype=torch.int64),
    },
    r"block_table must name blocks from 0 to 7 where seqused_k has keys, got 8 at \[1, 2\]": {
        "block_table": torch.tensor([[0, 1, 2], [3, 4, 8]]),
    },
    r"k must have the 2 sequences of seqused_k, got float32 \[3, 2, 48, 24\]": {
        "k": torch.zeros(3, 2, 48, 24), "v": torch.zeros(3, 2, 48, 24), "block_table": None,
    },
    r"sinks must be one number a head of q, \[4\], got float32 \[3\]": {"sinks": torch.zeros(3)},
    r"q must be \[tokens, heads, width\] with cu_seqlens": {
        "cu_seqlens_q": torch.tensor([0, 1, 2]),
    },
    r"cu_seqlens_k does not go with seqused_k": {"cu_seqlens_k": torch.tensor([0, 1, 2])},
    r"bias does not go with seqused_k": {"bias": torch.zeros(2, 48)},
    r"block_table must be on cpu like q, got meta": {
        "block_table": torch.zeros(2, 3, dtype=torch.int32, device="meta"),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_argument_wanted_and_got(message):
    case = paged(2, (40, 37), 16)
    arguments = {name: t for name, t in vars(case).items() if t is not None}
    with pytest.raises(RuntimeError, match=f"attention: {message}"):
        attention(**arguments | WRONG[message])


def test_the_definition_checks_too():
    case = paged(2, (40, 37), 16).double()
    with pytest.raises(RuntimeError, match="block_table must name blocks from 0 to 7"):
        replace(case, block_table=case.block_table - 9).call()


def test_errors_of_options():
    with pytest.raises(TypeError, match="attention: block_table must be a tensor, got int"):
        replace(paged(1, (4,), 16), block_table=4).call()
    with pytest.raises(ValueError, match="dropout_p must be 0 with seqused_k, got"):
        dense(2, (4,)).call(dropout_p=0.5)


def test_what_a_gpu_does_with_numbers_out_of_range():
    """The reference uses the nearest numbers, like the kernels where nobody checks."""
    case = paged(2, (40, 37), 16)
    table = case.block_table.clone()
    nearest = replace(case, block_table=table.clamp(0, len(case.k) - 1))
    far = torch.where(table < 0, -7, table)
    used = torch.tensor([40, 99])

    def run(case):
        return cached_attention_reference(
            case.q, case.k.nan_to_num(), case.v.nan_to_num(), case.seqused_k,
            block_table=case.block_table)  # fmt: skip

    actual = run(replace(case, block_table=far, seqused_k=used))
    want = run(replace(nearest, seqused_k=torch.tensor([40, 48])))
    assert all(map(torch.equal, actual, want))


@pytest.mark.skipif(not interpreted("triton"), reason="runs in the interpreter")
@grid(queries=[1, 70])
def test_tritons_kernel_replaces_numbers_out_of_range(queries):
    """Its operator checks nothing on a GPU."""
    from fusedops.triton.attention.call import AttentionLaunch
    from fusedops.triton.attention.forward import run

    case = paged(queries, (40, 37, 9), 16)
    case = replace(case, k=case.k.nan_to_num(), v=case.v.nan_to_num())
    table = torch.tensor([[1, -7, 2], [10**6, 3, 4], [5, 6, -1]], dtype=torch.int32)
    case = replace(case, block_table=table, seqused_k=torch.tensor([40, 99, -3]))
    k, v = case.k.transpose(1, 2), case.v.transpose(1, 2)
    out = torch.empty_like(case.q.transpose(1, 2), memory_format=torch.contiguous_format)
    out, lse = out.transpose(1, 2), torch.empty(case.q.shape[:3], dtype=torch.float64)
    call = AttentionLaunch.for_cache(
        case.q, k, v, case.seqused_k, table, None, None, (0.2, 0.0), (-1, 0)
    )
    run(call, out, lse)
    want, want_lse = case.reference(causal=True, scale=0.2)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5, check_dtype=False)
