"""`simplest` turns eager attention's float masks into causal=True, bools or no mask."""

import gc
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from axes import grid

from fusedops.functional import attention
from fusedops.patching import patch
from fusedops.patching.core import masks
from fusedops.patching.core.kinds import only
from fusedops.patching.core.masks import STRIP
from fusedops.patching.core.probing import within

transformers = pytest.importorskip("transformers")
from transformers.masking_utils import eager_mask  # noqa: E402

from patching.models.attention_models import batch, build  # noqa: E402

FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
ALONE = only("attention")
SIDES = 1, 2, 9, STRIP, STRIP + 1, 3 * STRIP + 5


def numbers(seen, dtype=torch.float32, hidden=None):
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def simplest(mask, scores=None):
    """For scores of the mask's dtype, unless another is given."""
    return masks.simplest(mask, scores or getattr(mask, "dtype", None))


def kept(mask):
    """A mask that stays numbers, for scores of its dtype.

    Float16's smallest number would not hide scores in float32.
    """
    if mask.dtype != torch.float16:
        return mask
    small, smallest = torch.finfo(torch.float16).min, torch.finfo(torch.float32).min
    return torch.where(mask == small, smallest, mask.float())


def triangle(n, batch=1):
    return torch.ones(batch, 1, n, n, dtype=torch.bool).tril()


@grid(n=SIDES, dtype=FLOATS)
def test_causal(dtype, n):
    for rows in (1, 3):
        mask = eager_mask(rows, n, n, dtype=dtype)
        assert simplest(mask) == simplest(mask[:1].expand(2, 4, n, n)) == (None, True)
        assert simplest(mask.masked_fill(mask != 0, -torch.inf)) == (None, True)


@grid(n=SIDES[1:], dtype=FLOATS)
def test_one_element_that_is_not_causal(dtype, n):
    """Wherever it is, and whatever its value."""
    least = torch.finfo(dtype).min
    draw = torch.Generator().manual_seed(n)
    for i, j in torch.randint(n, (12, 2), generator=draw).tolist():
        seen = triangle(n, 2)
        seen[1, 0, i, j] ^= True
        mask = numbers(seen, dtype)
        simple, causal = simplest(mask)
        bools = bool(seen.any(-1).all())  # every query sees a key
        assert not causal and torch.equal(simple, seen if bools else kept(mask))
        for value in (torch.nan, -1.0, 1.0, least / 2, torch.inf):
            mask[1, 0, i, j] = value
            simple, causal = simplest(mask)
            assert not causal
            torch.testing.assert_close(simple, kept(mask), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_is_seen(dtype):
    for shape in ((1, 1, 1, 7), (2, 1, 5, 5), (1, 4, 300, 300)):
        assert simplest(torch.zeros(shape, dtype=dtype)) == (None, False)


@grid(hidden=[None, -torch.inf], dtype=FLOATS)
def test_bools(dtype, hidden):
    for shape in ((2, 1, 1, 9), (2, 1, 5, 9), (1, 4, 9, 9), (2, 1, 200, 200)):
        seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
        seen[..., 1] = True
        simple, causal = simplest(numbers(seen, dtype, hidden))
        assert not causal and torch.equal(simple, seen)
        seen[0, 0, 0] = False  # a query that sees nothing
        mask = numbers(seen, dtype, hidden)
        simple, causal = simplest(mask)
        assert not causal and torch.equal(simple, kept(mask))
    row = numbers(seen[:1, :, 1:2], dtype, hidden).expand(2, -1, 7, -1)
    assert torch.equal(simplest(row)[0], seen[:1, :, 1:2].expand_as(row))
    window = triangle(200) & triangle(200).flip(2, 3).roll(3, -1)
    assert torch.equal(simplest(numbers(window, dtype, hidden))[0], window)


def test_what_is_passed_on():
    seen = triangle(5)
    assert simplest(None) == (None, False)
    assert simplest(seen)[0] is seen
    mask = numbers(seen).requires_grad_()
    simple, causal = simplest(mask)
    assert not causal and simple.requires_grad
    empty = torch.zeros(1, 1, 0, 5)
    assert simplest(empty)[0].shape == empty.shape


@grid(transform=["vmap", "trace", "compile", "mode"], dtype=FLOATS)
def test_where_values_may_not_be_read(transform, dtype):
    """Masks stay numeric."""
    mask, results = numbers(triangle(5), dtype), []

    def run(x):
        results.append(simplest(x))
        return results[-1][0]

    if transform == "vmap":
        out = torch.vmap(run)(mask)
    elif transform == "trace":
        out = torch.jit.trace(run, (mask,), check_trace=False)(mask)
    elif transform == "compile":
        out = torch.compile(run, backend="eager", fullgraph=True)(mask)
    else:
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            out = run(mask)
    assert out.dtype == kept(mask).dtype and torch.equal(out, kept(mask))
    assert not any(causal for _, causal in results)


# What was read is remembered.


@pytest.fixture
def reads():
    with mock.patch.object(masks, "_meaning", side_effect=masks._meaning) as counted:
        yield counted


def test_a_mask_is_read_once(reads):
    triangular, zeros = numbers(triangle(5)), numbers(torch.ones(1, 1, 1, 5, dtype=torch.bool))
    for _ in range(3):
        assert simplest(triangular) == (None, True) and simplest(zeros) == (None, False)
    assert reads.call_count == 2


def test_a_mask_that_is_written_to_is_read_again(reads):
    mask = numbers(triangle(5))
    assert simplest(mask) == (None, True)
    mask[0, 0, 1, 0] = torch.finfo(torch.float32).min
    assert not simplest(mask)[0][0, 0, 1, 0]
    assert reads.call_count == 2


def test_a_mask_that_counts_no_versions_is_read_each_time(reads):
    with torch.inference_mode():
        mask = numbers(triangle(5))
        assert simplest(mask) == (None, True)
        mask.zero_()
        assert simplest(mask) == (None, False)
    assert reads.call_count == 2


def test_what_was_read_goes_with_the_mask():
    mask = numbers(triangle(5).roll(1, 2))
    remembered = masks._thread.meanings
    gc.collect()
    simplest(mask)
    assert mask in remembered
    size = len(remembered)
    del mask
    gc.collect()
    assert len(remembered) == size - 1


def test_threads_do_not_share(reads):
    mask = numbers(triangle(5))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(simplest, mask).result() == simplest(mask) == (None, True)
    assert reads.call_count == 2


# In models.


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama", "bert", "t5", "whisper"])
def test_models_that_are_eager(name, reads, calls):
    """Their masks are made once for all layers of a kind, and read once."""
    model = build(name)
    model.set_attn_implementation("eager")
    for side in (None, "left") if name != "whisper" else (None,):
        kwargs = batch(name, side)
        want = model(**kwargs).logits
        shown = kwargs["attention_mask"].bool() if side and name != "t5" else slice(None)
        patch(model, **ALONE)
        calls.clear()
        reads.reset_mock()
        torch.testing.assert_close(model(**kwargs).logits[shown], want[shown])
        assert reads.call_count == READ.get((name, side), 1)
        kinds = {getattr(call["bias"], "dtype", None) for call in calls}
        blind = side and name != "bert"  # the first queries see no key
        assert kinds <= {None, torch.float32 if blind else torch.bool} or name == "t5"
        assert side or name == "bert" or any(call["causal"] for call in calls)


# The masks of a forward, by model and padding; there is none where all sees everything.
READ = {(name, side): 2 for name in ("gemma2", "gpt_oss") for side in (None, "left")}
READ |= {("bert", None): 0, ("t5", "left"): 3}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_says_what_is_causal(name, calls):
    """The mask decides, not the module."""
    model, kwargs = build(name), batch(name)
    model.set_attn_implementation("eager")
    masks_of = {True: numbers(triangle(9, 2)), False: torch.zeros(2, 1, 9, 9)}
    expected = [model(**kwargs, attention_mask=mask).logits for mask in masks_of.values()]
    patch(model, **ALONE)
    for (causal, mask), want in zip(masks_of.items(), expected, strict=True):
        calls.clear()
        torch.testing.assert_close(model(**kwargs, attention_mask=mask).logits, want)
        assert [(call["causal"], call["bias"]) for call in calls] == [(causal, None)] * 2


@grid(compiled=[False, True], dtype=FLOATS[:3])
def test_a_query_that_sees_nothing_gives_what_eager_code_gives(compiled, dtype):
    """In a graph too: the mean of all values for the smallest number."""
    q, k, v = (torch.randn(1, 2, 4, 8).to(dtype).requires_grad_() for _ in range(3))
    seen = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]]).bool()

    def run(q, k, v, mask):
        bias, causal = simplest(mask)
        return attention(q, k, v, causal=causal, bias=bias)

    def eager(q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / 8**0.5 + mask
        return scores.float().softmax(-1).to(dtype) @ v

    function = torch.compile(run, backend="eager") if compiled else run
    cotangent = torch.randn(1, 2, 4, 8).to(dtype)
    mask = numbers(seen[None, None], dtype)
    results = []
    for call in (function, eager):
        out = call(q, k, v, mask)
        results.append([out, *torch.autograd.grad(out, (q, k, v), cotangent)])
    for got, expected in zip(*results, strict=True):
        assert within(got, expected, 4 * torch.finfo(dtype).eps)
    assert within(results[0][0][:, :, 0], v.mean(2), torch.finfo(dtype).eps)
    infinite = function(q, k, v, numbers(seen[None, None], dtype, -torch.inf))
    assert not infinite[:, :, 0].count_nonzero()


@grid(compiled=[False, True], dtype=FLOATS, scores=FLOATS[:3])
def test_masks_of_another_dtype_than_the_scores(compiled, dtype, scores):
    """Eager code adds them in the wider dtype, where float16's smallest number hides no scores."""
    q, k, v = (torch.randn(1, 2, 4, 8).to(scores) for _ in range(3))
    seen = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]]).bool()
    mask = numbers(seen[None, None], dtype)

    def run(q, k, v, mask):
        bias, causal = simplest(mask, scores)
        return attention(q, k, v, causal=causal, bias=bias)

    out = (torch.compile(run, backend="eager") if compiled else run)(q, k, v, mask)
    added = q @ k.transpose(-2, -1) / 8**0.5 + mask
    expected = (added.float().softmax(-1).to(scores) @ v).nan_to_num(0)  # float64's becomes -inf
    assert within(out, expected, 4 * torch.finfo(scores).eps)


def test_a_mask_is_read_for_each_dtype_of_scores():
    mask = numbers(triangle(5).tril(-1), torch.float16)  # the first query sees no key
    for _ in range(2):
        narrow, wide = (simplest(mask, dtype)[0] for dtype in (torch.float16, torch.float32))
        assert narrow.amin() == torch.finfo(torch.float32).min and torch.equal(wide, mask.float())
