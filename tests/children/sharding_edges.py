"""Special cases of operators on DTensors, such as dropout, for test_dtensor.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from fusedops import functional as F

R = Replicate()
S = [Shard(d) for d in range(4)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def put(t: torch.Tensor, mesh: Any, *placements: Any) -> DTensor:
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


LOGITS, TARGET = randn(8, 12), torch.arange(8)
HIDDEN, HEAD = randn(8, 16), randn(12, 16, seed=1)
HEADS = randn(4, 4, 6, 8), randn(4, 2, 6, 8, seed=1), randn(4, 2, 6, 8, seed=2)


def choices(experts: int) -> torch.Tensor:
    draws = (torch.Generator().manual_seed(i) for i in range(6))
    return torch.stack([torch.randperm(experts, generator=draw)[:2] for draw in draws])


def mixture(experts: int) -> tuple[torch.Tensor, ...]:
    weights = randn(experts, 24, 16, seed=2), randn(experts, 16, 12, seed=3)
    return randn(6, 16), choices(experts), randn(6, 2, seed=1).abs(), *weights


def targets_that_are_no_class(mesh: Any, rank: int) -> None:
    """All ranks raise, also those whose rows are fine."""
    for wrong in (12, -7):
        target = TARGET.where(TARGET < 7, wrong)
        for place in (R, S[0]):
            t = put(target, mesh, place)
            for logits in (S[1], S[0]):
                with pytest.raises(IndexError, match=r"cross_entropy: target must be a class"):
                    F.cross_entropy(put(LOGITS, mesh, logits), t)
            with pytest.raises(IndexError, match=r"linear_cross_entropy: .* from 0 to 11 or"):
                F.linear_cross_entropy(put(HIDDEN, mesh, R), put(HEAD, mesh, S[0]), t)


def dropout_with_different_seeds(mesh: Any, rank: int) -> None:
    """All ranks drop the same elements, another call drops others, and own generators stay own."""
    torch.manual_seed(rank)
    for place in (S[0], R):
        x, q = put(torch.ones(4, 6, 8), mesh, place), put(HEADS[0], mesh, place)
        calls: list[Callable] = [
            lambda x=x: F.add_layer_norm(x, torch.zeros_like(x), dropout_p=0.5)[1],
            lambda x=x: F.add_rms_norm(x, torch.zeros_like(x), dropout_p=0.5)[1],
            lambda q=q: F.attention(q, q, q, dropout_p=0.5),
        ]
        for call in calls:
            first, second = (call().full_tensor() for _ in range(2))
            assert all_equal(first) and all_equal(second) and not first.equal(second)
    assert not all_equal(torch.rand(4))


def all_equal(t: torch.Tensor) -> bool:
    others = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(others, t.contiguous())
    return all(other.equal(t) for other in others)


def float64(mesh: Any, rank: int) -> None:
    """Formulas run instead of kernels."""
    q, k, v = (t.double() for t in HEADS)
    x, index, *more = (t.double() if t.is_floating_point() else t for t in mixture(4))
    logits, weight = LOGITS.double(), randn(12).abs().double()
    target = TARGET.where(TARGET != 0, -100)
    calls: list[tuple] = [
        (causal, (q, k, v), (S[1],) * 3),
        (lambda *qkv: F.attention(*qkv, window=(2, 0)), (q, k, v), (S[0],) * 3),
        (F.experts, (x, index, *more), (R, R, R, S[0], S[0])),
        *((F.cross_entropy, (logits, target, weight), (s, R, R)) for s in S[:2]),
        (F.linear_cross_entropy, (HIDDEN.double(), HEAD.double(), target), (R, S[0], R)),
    ]
    for run, tensors, placements in calls:
        out = run(*(put(t, mesh, p) for t, p in zip(tensors, placements, strict=True)))
        torch.testing.assert_close(out.full_tensor(), run(*tensors))


def outside_of_graphs(mesh: Any, rank: int) -> None:
    """torch.compile runs dropout and float64 uncompiled; with fullgraph=True it says why not."""
    torch.manual_seed(rank)
    x, heads = put(torch.ones(4, 6, 8), mesh, S[0]), [t.double() for t in HEADS]
    with pytest.raises(RuntimeError, match="cannot compile dropout or float64 of DTensors"):
        torch.compile(drop, backend="aot_eager", fullgraph=True)(x)
    dropped = torch.compile(drop, backend="aot_eager")
    first, second = (dropped(x).full_tensor() for _ in range(2))
    assert all_equal(first) and all_equal(second) and not first.equal(second)
    out = torch.compile(causal, backend="aot_eager")(*(put(t, mesh, S[1]) for t in heads))
    torch.testing.assert_close(out.full_tensor(), causal(*heads))


def drop(x):
    return F.add_rms_norm(x, torch.zeros_like(x), dropout_p=0.5)[1]


def double_backward(mesh: Any, rank: int) -> None:
    """With torch's implicit_replication, as the formulas create masks."""
    hidden, index, *more = mixture(4)
    calls: list[tuple] = [
        (causal, HEADS, (S[1],) * 3),
        (causal, [t.double() for t in HEADS], (S[1],) * 3),
        (lambda *qkv: F.attention(*qkv, window=(2, 0), softcap=3.0), HEADS, (S[0],) * 3),
        (lambda x, *more: F.experts(x, like(index, x), *more), (hidden, *more), (R, R, S[0], S[0])),
        *((lambda x: F.cross_entropy(x, like(TARGET, x)), (LOGITS,), (s,)) for s in S[:2]),
        *((run, (HIDDEN, HEAD), places)
          for run in (linear_loss, log_probs) for places in ((R, S[0]), (S[0], R))),
    ]  # fmt: skip
    for run, tensors, placements in calls:
        with implicit_replication():
            sharded = [put(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
            second_grads = twice(run, sharded)
        for got, want in zip(second_grads, twice(run, tensors), strict=True):
            largest = want.abs().max()  # an expert's, whose sums round differently
            scaled = got.full_tensor() / largest
            torch.testing.assert_close(scaled, want / largest, rtol=1e-4, atol=1e-4)


def causal(q, k, v):
    return F.attention(q, k, v, causal=True)


def linear_loss(x, weight):
    return F.linear_cross_entropy(x, weight, like(TARGET, x))


def log_probs(x, weight):
    return F.linear_log_probs(x, weight, like(TARGET, x))


def like(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return put(t, x.device_mesh, R) if isinstance(x, DTensor) else t


def twice(run: Callable, tensors) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    grads = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


def fewer_experts_than_ranks(mesh: Any, rank: int) -> None:
    for count in (3, 5):
        hidden, index, *more = mixture(count)
        leaves = [t.requires_grad_() for t in (hidden, *more)]
        want = F.experts(hidden, index, *more)
        placements = [(R, R), (R, R), (S[0], S[0]), (S[0], S[0])]
        pairs = zip(leaves, placements, strict=True)
        sharded = [put(t.detach(), mesh, *p).requires_grad_() for t, p in pairs]
        got = F.experts(sharded[0], put(index, mesh, R, R), *sharded[1:])
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(got.redistribute(mesh, [R, R]).sin().sum(), sharded)
        expected = torch.autograd.grad(want.sin().sum(), leaves)
        for g, w in zip(grads, expected, strict=True):
            torch.testing.assert_close(g.full_tensor(), w, rtol=1e-3, atol=1e-3)


def nothing_gathered(mesh: Any, rank: int) -> None:
    """Rows and vocabulary, or batch and heads, over one dimension of the mesh each."""
    for places in ((S[0], S[1]), (S[1], S[0])):
        x = put(LOGITS, mesh, *places).requires_grad_()
        with CommDebugMode() as seen:
            F.cross_entropy(x, put(TARGET, mesh, R, R)).backward()
        assert {str(op) for op in seen.get_comm_counts()} == {"c10d_functional.all_reduce"}
        assert x.grad.placements == places
        with CommDebugMode() as seen:
            out = F.attention(*(put(t, mesh, *places) for t in HEADS), causal=True)
        assert not seen.get_comm_counts() and out.placements == places
        torch.testing.assert_close(out.full_tensor(), F.attention(*HEADS, causal=True))


def uneven_batches_and_heads(mesh: Any, rank: int) -> None:
    """A batch of three, and three key heads over each dimension of the mesh."""
    q, k, v = randn(3, 6, 5, 8), randn(3, 3, 5, 8, seed=1), randn(3, 3, 5, 8, seed=2)
    want = F.attention(q, k, v, causal=True)
    for places in ((S[0], R), (S[1], R), (S[0], S[1]), (S[0], S[0])):
        out = F.attention(*(put(t, mesh, *places) for t in (q, k, v)), causal=True)
        torch.testing.assert_close(out.full_tensor(), want)


def means_with_ignored_rows(mesh: Any, rank: int) -> None:
    """One rank has more ignored rows than the other; in float64, and in a double backward."""
    target = TARGET.clone()
    target[1 : len(target) // 2] = -100
    for dtype in (torch.float32, torch.float64):
        x, w = HIDDEN.to(dtype), HEAD.to(dtype)
        for run, tensors, placements in (
            (lambda x, t: F.cross_entropy(x, t), (LOGITS.to(dtype),), (S[0],)),
            (lambda x, w, t: F.linear_cross_entropy(x, w, t), (x, w), (S[0], R)),
        ):
            with implicit_replication():
                sharded = [put(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
                rows = put(target, mesh, S[0])
                loss = run(*sharded, rows).full_tensor()
                grads = twice(lambda *given, run=run, rows=rows: run(*given, rows), sharded)
            torch.testing.assert_close(loss, run(*tensors, target))
            wholes = twice(lambda *given, run=run: run(*given, target), tensors)
            for got, want in zip(grads, wholes, strict=True):
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)


IN_A_ROW = targets_that_are_no_class, float64, double_backward, means_with_ignored_rows
IN_A_SQUARE = fewer_experts_than_ranks, nothing_gathered, uneven_batches_and_heads
IN_PROCESSES = dropout_with_different_seeds, outside_of_graphs  # threads share their generator
