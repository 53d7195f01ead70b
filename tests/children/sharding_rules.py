"""Calls of operators on DTensors, for tests/integrations/test_dtensor.py.

The same call on whole plain tensors says what is right. The test runs all cases in threads. As a
child script, `python -m children.sharding_rules RANK RANKS FILE CASES FOLDER` in tests/ is one
rank's process, which runs cases over gloo.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from children.ranks import group
from children.sharding_edges import IN_PROCESSES
from fusedops import functional as F
from fusedops.patching import fuse_always

R, P = Replicate(), Partial()
S = [Shard(d) for d in range(4)]
draw = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw)


@dataclass
class Case:
    """An operator's call.

    run: takes the tensors. local: placements of the tensors for which neither forward nor backward
    moves a byte, and the first output's placements. sums: placements for which nothing is moved
    but sums and maxima over the ranks. constant: how many of the last tensors get no gradients.
    """

    name: str
    run: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    local: list[tuple[tuple, tuple]] = field(default_factory=list)
    sums: list[tuple] = field(default_factory=list)
    constant: int = 0

    def on(self, mesh: Any, placements: Any) -> list[DTensor]:
        return [placed(t, mesh, p) for t, p in zip(self.tensors, placements, strict=True)]


def rows(count: int, *more: Any) -> list[tuple[tuple, tuple]]:
    """Placements of `count` tensors with their first two dimensions sharded, and then `more`."""
    return [((s,) * count + more, (s,)) for s in S[:2]]


TARGET = torch.randint(7, (8,), generator=draw)
TARGET[2] = -100
TOPK = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(8)])
LOGITS, VOCABULARY = (3 * randn(8, 7),), [(S[1],)]
HEAD = randn(8, 16), randn(7, 16), randn(7)
FAR_BELOW = *HEAD[:2], HEAD[2] - 100  # exp(100) is infinite in float32
OF_HEAD = [(R, S[0], S[0]), (S[0], R, R)]
SMOOTHED = {"label_smoothing": 0.1}
SOFTCAP = {"softcap": 4.0, "scale": 0.7, "z_loss": 1e-2}
X, W, B = randn(4, 6, 32), randn(32), randn(32)
HEADS = randn(4, 4, 6, 16), randn(4, 2, 6, 16), randn(4, 2, 6, 16)
COS, SIN = randn(1, 6, 16), randn(1, 6, 16)


def loss(reduction: str, **options: Any) -> Callable:
    target = TARGET.where(TARGET >= 0, options.get("ignore_index", -100))
    place = (lambda t, x: t) if reduction == "sum" else placed_like  # a plain one is the same
    return lambda x: F.cross_entropy(x, place(target, x), reduction=reduction, **options)


def linear_loss(reduction: str, **options: Any) -> Callable:
    def run(x, weight, bias=None):
        target = placed_like(TARGET, x)
        more = {"linear_bias": bias, "reduction": reduction, **options}
        return F.linear_cross_entropy(x, weight, target, **more)

    return run


def placed_like(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Replicated if x is a DTensor."""
    if not isinstance(x, DTensor):
        return t
    return DTensor.from_local(t, x.device_mesh, [R] * x.device_mesh.ndim, run_check=False)


def experts(hidden, weights, gate_up, down):
    return F.experts(hidden, placed_like(TOPK, hidden), weights, gate_up, down)


def gates(function: Callable, **options: Any) -> Callable:
    return lambda *tensors: function(*tensors, **options)


CASES = [
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (32,), w, b), (X, W, B), rows(1, R, R)),
    Case("rms_norm", lambda x, w: F.rms_norm(x, (32,), w), (X, W), rows(1, R)),
    Case("rms_norm of Llama", lambda x, w: F.rms_norm(x, (32,), w, rounding="llama"), (X, W)),
    Case("add_layer_norm", F.add_layer_norm, (X, randn(4, 6, 32), W, B)),
    Case("add_rms_norm", F.add_rms_norm, (X, randn(4, 6, 32), W)),
    Case("linear", F.linear, (X, randn(16, 32), randn(16)), [*rows(1, R, R)]),
    Case("linear by columns", F.linear, (X, randn(16, 32)), [((R, S[0]), (S[2],))]),
    Case("linear by depth", F.linear, (X, randn(16, 32)), [((S[2], S[1]), (P,))]),
    Case(
        "linear with gelu",
        lambda *tensors: F.linear(*tensors, "gelu"),
        (X, randn(16, 32), randn(16)),
        [*rows(1, R, R), ((R, S[0], S[0]), (S[2],))],
    ),
    Case("swiglu", F.swiglu, (X, randn(4, 6, 32)), [((s, s), (s,)) for s in S[:3]]),
    Case("swiglu packed", F.swiglu, (X,), rows(1)),
    Case("geglu", F.geglu, (X, randn(4, 6, 32)), [((s, s), (s,)) for s in S[:3]]),
    Case(
        "rotary_embedding",
        F.rotary_embedding,
        (*HEADS[:2], COS, SIN),
        [((S[0], S[0], R, R), (S[0],)), ((S[1], S[1], R, R), (S[1],)),
         ((S[2], S[2], S[1], S[1]), (S[2],))],
        constant=2,
    ),
    Case(
        "rotary_embedding of a batch of tables",
        lambda *tensors: F.rotary_embedding(*tensors, unsqueeze_dim=2),
        (randn(4, 6, 4, 16), randn(4, 6, 2, 16), randn(4, 6, 16), randn(4, 6, 16)),
        [((S[0],) * 4, (S[0],)), ((S[1],) * 4, (S[1],)), ((S[2], S[2], R, R), (S[2],))],
        constant=2,
    ),
    Case(
        "attention of three key heads",
        lambda *qkv: F.attention(*qkv, causal=True),
        (randn(4, 6, 6, 16), randn(4, 3, 6, 16), randn(4, 3, 6, 16)),
    ),
    Case(
        "attention",
        lambda *qkv: F.attention(*qkv, causal=True, return_lse=True),
        HEADS,
        [((s,) * 3, (s,)) for s in S[:2]],
    ),
    Case(
        "attention with a bias and sinks",
        lambda q, k, v, bias, sinks: F.attention(q, k, v, bias=bias, sinks=sinks, softcap=5.0),
        (*HEADS, randn(4, 4, 6, 6), randn(4)),
        [((S[0],) * 4 + (R,), (S[0],)), ((S[1],) * 4 + (S[0],), (S[1],))],
    ),
    Case(
        "attention with a bias of all heads",
        lambda q, k, v, bias: F.attention(q, k, v, bias=bias),
        (*HEADS, randn(6, 6)),
        [((S[1],) * 3 + (R,), (S[1],))],
    ),
    Case("experts", experts, (randn(8, 16), randn(8, 2).abs(), randn(4, 24, 16), randn(4, 16, 12)),
         [((S[0], S[0], R, R), (S[0],)), ((R, R, S[0], S[0]), (P,))]),
    Case("cross_entropy none", loss("none"), LOGITS, [((S[0],), (S[0],))], VOCABULARY),
    Case("cross_entropy sum softcap", loss("sum", **SOFTCAP), LOGITS, sums=VOCABULARY),
    Case("cross_entropy mean", loss("mean"), LOGITS, sums=[(S[0],), *VOCABULARY]),
    Case("cross_entropy mean ignore_index", loss("mean", ignore_index=4), LOGITS),
    Case("cross_entropy mean label_smoothing", loss("mean", **SMOOTHED), LOGITS),
    Case("cross_entropy mean grad_in_forward", loss("mean", grad_in_forward=True), LOGITS),
    Case("linear_cross_entropy none", linear_loss("none"), FAR_BELOW, sums=[(R, S[0], S[0])]),
    Case("linear_cross_entropy sum", linear_loss("sum", **SOFTCAP), HEAD[:2], sums=[(R, S[0])]),
    Case("linear_cross_entropy mean", linear_loss("mean"), HEAD, sums=OF_HEAD),
    Case("linear_cross_entropy mean label_smoothing", linear_loss("mean", **SMOOTHED), HEAD),
    Case(
        "linear_log_probs",
        lambda x, w: F.linear_log_probs(x, w, placed_like(TARGET.clamp(min=0), x)),
        (randn(8, 16), randn(7, 16)),
    ),
]  # fmt: skip


# In a square, for a few: DTensor searches long for the placements of many tensors.
SQUARE = "layer_norm", "add_rms_norm", "linear", "linear by columns", "attention", "experts"
SQUARE += ("cross_entropy mean", "linear_cross_entropy mean")

# A few rules, and all handlers: over the experts or the vocabulary.
COMPILED = "add_rms_norm", "linear by depth", "attention", "experts"
COMPILED += ("cross_entropy mean", "linear_cross_entropy sum")


def outputs_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if t is not None]


def both(case: Case, tensors, gradients) -> tuple[list, list]:
    """(outputs, gradients) of a call."""
    count = len(tensors) - case.constant
    leaves = [t.detach().requires_grad_(i < count) for i, t in enumerate(tensors)]
    outputs = outputs_of(case.run(*leaves))
    return outputs, list(torch.autograd.grad(outputs, leaves[:count], gradients(outputs)))


def cotangents(outputs) -> list[torch.Tensor]:
    seed = torch.Generator().manual_seed(1)
    return [torch.randn(o.shape, generator=seed).to(o.dtype) for o in outputs]


def placed(t: torch.Tensor, mesh, placements) -> DTensor:
    """A partial one's terms are equal, so that their sum is exact."""
    whole = [R if p == P else p for p in placements]
    whole_t = distribute_tensor(t, mesh, whole, src_data_rank=None)
    terms = 1
    for dim, p in enumerate(placements):
        terms *= mesh.size(dim) if p == P else 1
    return DTensor.from_local(
        whole_t.to_local() / terms if terms > 1 else whole_t.to_local(),
        mesh, placements, run_check=False, shape=t.shape, stride=t.stride(),
    )  # fmt: skip


def full(t: torch.Tensor) -> torch.Tensor:
    assert isinstance(t, DTensor)
    return t.full_tensor()


def replicated(output: DTensor) -> list:
    return [R] * output.device_mesh.ndim


def as_output(output: DTensor) -> list:
    return [R if p == P else p for p in output.placements]


def by_batch(output: DTensor) -> list:
    return [S[0] if output.dim() else R]


def gradients_of(outputs: list, mesh: Any, place: Callable) -> list[DTensor]:
    pairs = zip(outputs, cotangents(outputs), strict=True)
    return [placed(c, mesh, place(o)) for o, c in pairs]


def sharded(case: Case, mesh, placements, place: Callable) -> tuple[list, list]:
    """(outputs, gradients) for these placements of the tensors. place: the cotangents' ones."""
    return both(case, case.on(mesh, placements), partial(gradients_of, mesh=mesh, place=place))


def assert_equal(results: tuple[list, list], expected: tuple[list, list], title: str) -> None:
    """Gathers all results, so that none of a rank's collectives is left when others end."""
    for got, want in zip([*results[0], *results[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(
            full(got.detach()), want.detach(), rtol=2e-5, atol=2e-5,
            msg=lambda text: f"{title}: {text}",
        )  # fmt: skip


def check(case: Case, mesh, placements, expected, place: Callable = replicated) -> None:
    results = sharded(case, mesh, placements, place)
    assert_equal(results, expected, f"{case.name} {placements}")


def alone(case: Case) -> tuple[list, list]:
    return both(case, case.tensors, cotangents)


def single(case: Case) -> Iterator[tuple]:
    """Placements of one tensor at a time, by every dimension or partial; the others replicated."""
    for i, t in enumerate(case.tensors):
        for p in [*S[: t.dim()], P]:
            yield tuple(p if i == j else R for j in range(len(case.tensors)))


def in_a_row(case: Case, mesh) -> None:
    expected = alone(case)
    for placements, out_placements in [*case.local, *((p, None) for p in case.sums)]:
        over_mesh = [(p,) for p in placements]
        with CommDebugMode() as seen:
            results = sharded(case, mesh, over_mesh, as_output)
        moved = {str(op) for op in seen.get_comm_counts()}
        assert moved <= ({"c10d_functional.all_reduce"} if out_placements is None else set())
        assert out_placements in (None, results[0][0].placements), (placements, out_placements)
        assert_equal(results, expected, f"{case.name} {placements}")
        check(case, mesh, over_mesh, expected, by_batch)
    for placements in single(case):
        check(case, mesh, [(p,) for p in placements], expected)


def compiled(case: Case, mesh) -> None:
    """One graph has the same results, for placements over the heads, experts or vocabulary."""
    in_a_graph = replace(case, run=torch.compile(case.run, backend="aot_eager", fullgraph=True))
    *_, placements = [*(p for p, _ in case.local), *case.sums] or single(case)
    check(in_a_graph, mesh, [(p,) for p in placements], alone(case), as_output)


def in_a_square(case: Case, mesh) -> None:
    """Two dimensions: what is local over each, and the pairs of it."""
    expected = alone(case)
    choices = [*(p for p, _ in case.local), *case.sums] or [next(single(case))]
    for first, second in itertools.product([*choices, (R,) * len(case.tensors)], repeat=2):
        placements = list(zip(first, second, strict=True))
        if any(len(set(p)) == 1 and p[0] in S and t.shape[p[0].dim] < 4
               for p, t in zip(placements, case.tensors, strict=True)):  # fmt: skip
            continue
        check(case, mesh, placements, expected)


def main(rank: str, ranks: str, meeting: str, cases: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    named: dict[str, Callable] = {case.name: partial(in_a_row, case) for case in CASES}
    named |= {edge.__name__: partial(edge, rank=int(rank)) for edge in IN_PROCESSES}
    with group(rank, ranks, meeting), fuse_always():
        mesh = init_device_mesh("cpu", (int(ranks),))
        for name in cases.split(","):
            named[name](mesh=mesh)
            print(f"case {name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
