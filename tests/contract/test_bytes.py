"""Every operator's byte formula equals the reads and writes of its calls."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from adamw.cases import step_of
from axes import grid
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fusedops
from contract.family import FAMILIES
from fusedops.backends import operators
from fusedops.functional import quantize_weight
from fusedops.profiling.collect.traffic import formulas, touched, traffic

CPU = torch.device("cpu")
PUBLIC = {op for name in fusedops.backends.FAMILIES if name != "adamw" for op in operators(name)}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def further_norms(device: torch.device) -> Iterator[tuple[str, tuple]]:
    """With a bias, whose numbers no gradient needs, and dropout's mask."""
    x, bias, options = drawn(3, 20), drawn(20), (1, 1e-5, "layer", 0.0, 0.0, None)
    args = (x, None, bias, bias + 1, *options)
    yield "norm_forward", args
    stats = torch.ops.fusedops.norm_forward(*args)[2]
    mask = [True, False, True, True]
    yield "norm_backward", (drawn(3, 20), None, x, bias, bias + 1, stats, *options, mask)
    yield "dropout_mask", (torch.tensor(7), 3, 20, 0.5)


def attention_backwards(device: torch.device) -> Iterator[tuple[str, tuple]]:
    """With a mask and sinks, of all gradients and of some."""
    q, k, v, bias = drawn(2, 4, 70, 8), drawn(2, 2, 70, 8), drawn(2, 2, 70, 6), drawn(1, 1, 70, 70)
    all_sinks = drawn(4)
    none, options = (None, None, None, 70, 70), ([0.5, 0.0, 0.0], [-1, 0], True)
    for sinks in (all_sinks, None):
        out, lse = torch.ops.fusedops.attention_forward(q, k, v, bias, sinks, *none, *options)
        for mask in ([True] * 4 + [sinks is not None], [False, True, True, False, False]):
            args = (drawn(*out.shape), lse * 0.1, q, k, v, bias, sinks, *none[:3], out, lse)
            yield "attention_backward", (*args, *none[3:], *options, mask)


def groups(device: torch.device) -> Iterator[tuple[str, tuple]]:
    for kind in ("int4", "nf4", "int8"):
        yield "quantize_groups", (drawn(5, 64), kind, [1.0, 0.9])


def steps(moments: str, device: torch.device, **options: Any) -> Iterator[tuple[str, tuple]]:
    step = step_of([(300,), (7, 5)], moments=moments, **options)
    squares = torch.ops.fusedops.adamw_squares(step.grads)
    scalars = torch.tensor([2.0]), torch.tensor([0.0])
    yield "adamw_squares", (step.grads,)
    yield "adamw_step", tuple(step.arguments())
    yield "adamw_step", (*step.arguments(), squares, 3.0, *scalars)  # 0.1 would change no code
    yield "adamw_scale", (step.grads, squares, 0.1)


MORE = {
    "norm": {"bias": further_norms},
    "attention": {"backward": attention_backwards},
    "quantized_linear": {"groups": groups},
    "adamw": {
        **{moments: partial(steps, moments) for moments in ("float32", "bfloat16", "int8")},
        "amsgrad": partial(steps, "float32", amsgrad=1.0),
    },
}
CALLS = {
    f"{family}-{name}": make
    for family in fusedops.backends.FAMILIES
    for name, make in (
        (FAMILIES[family].kernels if family in FAMILIES else {}) | MORE.get(family, {})
    ).items()
}


# Its loop loads dy, gate and up whichever gradients are wanted.
LOADS_ALL = {"fusedops::gated_activation_backward"}


def calls_of(make: Any) -> list[tuple[Any, tuple]]:
    """The kernels' own operators among a family's calls."""
    kernel_calls = [(name, args) for name, args in make(CPU) if name not in PUBLIC]
    return [(getattr(torch.ops.fusedops, name).default, args) for name, args in kernel_calls]


def other(t: Tensor) -> Tensor:
    """Other numbers, strided alike."""
    copy, draw = t.clone(), torch.Generator().manual_seed(5)
    if t.is_floating_point():
        return copy.copy_(torch.randn(t.shape, generator=draw))
    if t.dtype == torch.bool:
        return copy.logical_not_()
    return copy.copy_(torch.randint(16, t.shape, generator=draw))


def copied(args: tuple) -> tuple:
    leaves, spec = tree_flatten(args)
    clones = {id(leaf): leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)}
    return tree_unflatten([clones.get(id(leaf), leaf) for leaf in leaves], spec)


def bits(values: Any) -> list[bytes]:
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    return [bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors]


def ran(func: Any, args: tuple) -> list[bytes]:
    """The bits of all results and all arguments after a call."""
    args = copied(args)
    torch.manual_seed(0)
    with torch.no_grad():
        return bits([func(*args), args])


class Storages:
    """Marks the bytes of storages that were seen."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []  # no storage is freed and used again

    def see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        size = t.element_size()
        mask = self.seen.setdefault(
            storage.data_ptr(), torch.zeros(storage.nbytes(), dtype=torch.bool)
        )
        strides = (*(size * stride for stride in t.stride()), 1)
        mask.as_strided((*t.shape, size), strides, t.storage_offset() * size).fill_(True)
        self.kept.append(t)

    @property
    def bytes(self) -> int:
        return sum(int(mask.sum()) for mask in self.seen.values())


def observed(func: Any, args: tuple) -> int:
    """Counts the bytes that a call reads, changes and returns.

    A tensor is read if other numbers in it change a result, and changed if its bits are not the
    same afterwards. Scalars and indices count as read.
    """
    leaves, spec = tree_flatten(args)
    before = ran(func, args)
    after = copied(args)
    with torch.no_grad():
        results = func(*after)
    read, changed, returned = Storages(), Storages(), Storages()
    for i, (leaf, now) in enumerate(zip(leaves, tree_leaves(after), strict=True)):
        if not isinstance(leaf, Tensor):
            continue
        place = sum(isinstance(t, Tensor) for t in leaves[i:])  # of its own bits, from the end
        perturbed = list(leaves)
        perturbed[i] = other(leaf)
        index = leaf.numel() == 1 or leaf.dtype == torch.int64
        rerun = before if index else ran(func, tree_unflatten(perturbed, spec))
        others = [*before[:-place], *before[len(before) - place + 1 :]]
        matters = others != [*rerun[:-place], *rerun[len(rerun) - place + 1 :]]
        if index or matters or func._schema.name in LOADS_ALL:
            read.see(leaf)
        if bits(leaf) != bits(now):
            changed.see(leaf)
            read.see(leaf)
    for result in tree_leaves(results):
        if isinstance(result, Tensor):
            returned.see(result)
    return read.bytes + changed.bytes + returned.bytes


@pytest.mark.parametrize("name", CALLS)
def test_what_moves_once_is_what_a_call_reads_and_writes(name):
    for func, args in calls_of(CALLS[name]):
        expected = observed(func, args)
        args = copied(args)
        with torch.no_grad():
            results = func(*args)
        unread = traffic(func, args, {}).unread
        actual = sum(size for _, size in touched(func, args, {}, results, unread))
        assert actual == expected, func


def test_every_operator_has_a_formula_and_is_called_here():
    """A new operator gets one in fusedops/costs/<family>.py: `once` where the rule holds."""
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name for s in schemas if s.name.startswith("fusedops::")}
    definitions = {name for name in names if name.endswith("_reference")}
    kernels = names - definitions - {f"fusedops::{op}" for op in PUBLIC}
    assert kernels == set(formulas())
    called = {func._schema.name for make in CALLS.values() for func, _ in calls_of(make)}
    assert called == kernels


# What moves again, counted by loops like the kernels' over slices of the tensors.


def again(name: str, *args: Any) -> int:
    func = getattr(torch.ops.fusedops, name).default
    return sum(size for _, size in traffic(func, args, {}).again)


def slices(t: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return list(t.split(size, dim))


@pytest.mark.parametrize("rows, classes", [(100, 500), (100, 2500), (3000, 2500)])
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, False)])
def test_a_loss_that_makes_gradients_reads_the_weight_for_each_block_of_rows(rows, classes, mask):
    x, w, dx = drawn(rows, 512), drawn(classes, 512), drawn(rows, 512)
    step = min(max(rows // 8, 128), 512)
    moves: dict[str, int] = defaultdict(int)
    for block, dx_block in zip(slices(x, step), slices(dx, step), strict=True):
        for for_gradients in (False, True):
            for stripe in slices(w, 1024):
                moves["input"] += block.nbytes * (mask[1] or not for_gradients)
                moves["weight"] += stripe.nbytes * (mask[0] or not for_gradients)
                moves["dinput"] += 2 * dx_block.nbytes * mask[0] * for_gradients
                moves["dweight"] += 2 * stripe.nbytes * mask[1] * for_gradients
    target = torch.zeros(rows, dtype=torch.int64)
    options = -100, 1, [0.0, 0.0, 1.0, 0.0], torch.float32, list(mask)
    extra = again("linear_cross_entropy_forward", x, w, target, None, None, *options)
    assert extra == sum(moves.values()) - x.nbytes - w.nbytes  # which are read once anyway


@grid(mask=[(True, True, False), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("classes", [500, 2500])
def test_a_loss_without_gradients_and_its_backward_read_the_input_for_each_stripe(classes, mask):
    x, w, lse = drawn(300, 64), drawn(classes, 64), drawn(300)
    forward = backward = 0
    for stripe in slices(w, 1024):
        forward += stripe.nbytes + x.nbytes
        backward += stripe.nbytes * (1 + mask[0]) + x.nbytes * (1 + mask[1] + 2 * mask[0])
    target, once = torch.zeros(300, dtype=torch.int64), x.nbytes + w.nbytes
    options = -100, 1, [0.0, 0.0, 1.0, 0.0]
    args = x, w, target, None, None, *options, torch.float32, [False] * 3
    assert again("linear_cross_entropy_forward", *args) == forward - once
    args = drawn(1), x, w, target, None, None, lse, drawn(1), *options, list(mask)
    assert again("linear_cross_entropy_backward", *args) == backward - once
    args = x, w, target, None, -100, [1.0, 0.0], torch.float32, [True, True]
    assert again("linear_log_probs_forward", *args) == forward - once
    args = drawn(300), None, x, w, target, None, lse, None, -100, [1.0, 0.0], list(mask)
    assert again("linear_log_probs_backward", *args) == backward - once


@grid(rows=[0, 1, 128, 257, 600], kind=["int4", "int8"])
def test_codes_are_read_for_each_block_of_rows(kind, rows):
    q = quantize_weight(drawn(48, 128), kind)
    codes, x, dy = (q.qweight, q.scales, q.zeros), drawn(rows, 128), drawn(rows, 48)
    sizes, size = (kind, 48, 128, q.group_size), sum(t.nbytes for t in q.tensors().values())
    blocks = [max(0, len(slices(x, of)) - 1) if rows else 0 for of in (256, 128)]
    for name in ("quantized_linear_forward", "quantized_linear_tiles"):
        assert (
            again(name, x, *codes, None, *sizes, "none", "none", "any", False) == blocks[0] * size
        )
    for z, both in ((None, True), (dy, True), (dy, False)):
        args = dy, *codes, z, *sizes, "none", "any", [True, both]
        dz_bytes = dy.nbytes * (both + (z is not None))
        assert again("quantized_linear_backward", *args) == blocks[1] * size + dz_bytes


def attended(queries: int, keys: int, heads: tuple[int, int], window: list[int], batch: int = 2):
    q, k, v = drawn(batch, heads[0], queries, 8), drawn(batch, heads[1], keys, 8), None
    v = drawn(batch, heads[1], keys, 6)
    return q, k, v, ([0.5, 0.0, 0.0], window, True)


def visible(queries: int, keys: int, window: list[int]) -> Tensor:
    """[queries, keys] bool: which keys a query sees, the last query aligned with the last key."""
    at = torch.arange(queries)[:, None] + keys - queries
    j, (left, right) = torch.arange(keys), window
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= (j >= at - left) if left >= 0 else seen
    return seen & (j <= at + right) if right >= 0 else seen


CASES = {
    "all": (200, 300, (4, 2), [-1, -1]),
    "causal": (200, 300, (4, 2), [-1, 0]),
    "window": (200, 300, (4, 4), [50, 20]),
    "more queries than keys": (150, 40, (2, 1), [-1, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_queries_read_the_keys_that_they_see(name):
    q, k, v, options = attended(*CASES[name])
    seen = visible(*CASES[name][:2], CASES[name][3])
    forward = backward = 0
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            of = batch, head * k.shape[1] // q.shape[1]
            for block in slices(seen, 64):
                columns = block.any(0)
                both = k[of][columns].nbytes, v[of][columns].nbytes
                forward += sum(both)
                backward += 2 * both[0] + both[1]
    none, out, lse = (None, None, None), drawn(*q.shape[:3], 6), drawn(*q.shape[:3])
    longest = q.shape[2], k.shape[2]
    assert again("attention_forward", q, k, v, None, None, *none, *longest, *options) == forward
    args = (
        out,
        None,
        q,
        k,
        v,
        None,
        None,
        *none,
        out,
        lse,
        *longest,
        *options,
        [True] * 3 + [False] * 2,
    )
    # and k in a second order, q and out's gradient as second operands
    assert again("attention_backward", *args) == backward + k.nbytes + q.nbytes + out.nbytes
