"""Times a small Llama's generate(), patched and unpatched: `python -m benchmarks generate`.

The model continues one prompt greedily in bfloat16; a run lasts from the call to the last token.
Every contender has its own copy of the same random weights, and contenders alternate. patch's own
verify compares results. Greedy tokens are counted up to the first difference: two logits within
rounding of each other may change places, and later tokens depend on it.
"""

import random
from argparse import Namespace
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.profiler import ProfilerActivity, profile, record_function

import fusedops
from benchmarks.harness import report
from fusedops.measuring.ratios import paired_ratio
from fusedops.patching.core.kinds import only

BASE = "unpatched"
ARRIVED = "a token arrived"  # the name of the profiler's event
PROFILED = 3  # runs of each contender
CACHES = {"dynamic": "a DynamicCache", "static": "a StaticCache"}


@dataclass(frozen=True)
class Contender:
    """What is done to the model. left: kinds that patch skips."""

    patched: bool = True
    left: tuple[str, ...] = ()
    quantize: str | None = None
    low_latency: bool = False

    def prepare(self, model: Any, seen: dict[str, Tensor]) -> None:
        sites: dict[str, Any] = dict.fromkeys(self.left, False)
        if self.low_latency:
            fusedops.low_latency(model, quantize=self.quantize)
        elif self.quantize is not None:
            fusedops.patch(model, quantize=self.quantize)
        elif self.patched:
            fusedops.patch(model, **sites, verify=seen)


CONTENDERS = {
    BASE: Contender(patched=False),
    "fusedops, attention alone": Contender(left=tuple(only("attention"))),
    "fusedops": Contender(),
    "fusedops, nf4": Contender(quantize="nf4"),
    "low_latency": Contender(low_latency=True),
    "low_latency, nf4": Contender(low_latency=True, quantize="nf4"),
}
ATTENTION = ("aten::scaled_dot_product_attention", "fusedops::attention_forward")
# Operators of aten that compute nothing themselves.
NAMES = """
alias as_strided chunk detach empty empty_like empty_strided expand expand_as flatten item
lift_fresh linear matmul narrow new_empty new_ones permute reshape resize_ resolve_conj
resolve_neg result_type select slice split squeeze t to transpose unflatten unsafe_chunk
unsafe_split unsqueeze view view_as _local_scalar_dense _reshape_alias _to_copy _unsafe_view
"""
BOOKKEEPING = frozenset(NAMES.split())
SEEN = 128  # tokens that verify compares: the fewest with our attention in a prefill


@dataclass(frozen=True)
class Settings:
    prompt: int = 512
    new: int = 32
    rounds: int = 9
    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 4
    mlp: int = 2816
    vocabulary: int = 8192


QUICK = Settings(prompt=256, new=4, rounds=2, hidden=128, layers=2, heads=4, kv_heads=1, mlp=256)


@dataclass(frozen=True)
class Run:
    """One generate(): seconds to the first token and to each later one, and the tokens."""

    first: float
    each: list[float]
    tokens: list[int]

    @property
    def total(self) -> float:
        return self.first + sum(self.each)


class Clock:
    """A streamer that notes when each token arrives. generate() first passes the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(perf_counter())
        with record_function(ARRIVED):
            pass

    def end(self) -> None:
        pass


Key = tuple[str, str]  # of a contender: its name, and its cache


def measure(args: Namespace) -> int:
    """Times every contender with every cache and writes `args.json`. Returns the exit status."""
    settings = QUICK if args.quick else Settings()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, settings.vocabulary, (1, settings.prompt), generator=draw)
    models = {name: _model(settings, contender, ids) for name, contender in CONTENDERS.items()}
    keys = [(name, cache) for cache in CACHES for name in models if _has(name, cache)]
    ran = {key: _ran(models[key[0]], ids, settings, key) for key in keys}
    runs = _interleaved(models, ids, settings, keys)
    inside = _seconds_in_kernels(models, ids, settings, keys)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    rows = []
    for cache, named in CACHES.items():
        title = f"generate of llama bfloat16, {settings.prompt} + {settings.new} tokens, {named}"
        title += f", {threads}, {args.allocator} allocator"
        print(title, flush=True)
        for key in keys:
            if key[1] == cache:
                row = {"title": title, **_row(key, runs), "attention": ran[key]}
                outside = 1 - inside[key] / row["token_p50_s"]
                rows.append(row | {"kernels_s": inside[key], "outside_kernels": outside})
                print(_shown(rows[-1]), flush=True)
    report.save(args, rows, [], model=asdict(settings))
    return 0


def _has(name: str, cache: str) -> bool:
    """low_latency chooses the static cache itself."""
    return cache == "static" or not CONTENDERS[name].low_latency


def _model(settings: Settings, contender: Contender, ids: Tensor) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        intermediate_size=settings.mlp,
        vocab_size=settings.vocabulary,
        eos_token_id=None,  # else a random model may stop early
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().eval()
    contender.prepare(model, {"input_ids": ids[:, :SEEN]})
    return model


def _interleaved(
    models: dict[str, Any], ids: Tensor, settings: Settings, keys: list[Key]
) -> dict[Key, list[Run]]:
    """Returns each contender's runs, one per round, in an order shuffled for each round."""
    runs: dict[Key, list[Run]] = {key: [] for key in keys}
    order = random.Random(0)
    for _ in range(settings.rounds):
        for key in order.sample(keys, len(keys)):
            runs[key].append(_run(models[key[0]], ids, settings, key))
    return runs


def _run(model: Any, ids: Tensor, settings: Settings, key: Key) -> Run:
    name, cache = key
    sets_cache = CONTENDERS[name].low_latency
    clock = Clock()
    start = perf_counter()
    sequences = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=settings.new,
        streamer=clock,
        **({} if sets_cache else {"cache_implementation": cache, "disable_compile": True}),
    )
    _, first, *later = clock.times
    each = np.diff([first, *later]).tolist()
    return Run(first - start, each, sequences[0, ids.shape[1] :].tolist())


def _ran(model: Any, ids: Tensor, settings: Settings, key: Key) -> dict[str, int]:
    """Returns how often each attention function ran in one generate(), which also warms up."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _run(model, ids, settings, key)
    return {op.key: op.count for op in profiled.key_averages() if op.key in ATTENTION}


def _seconds_in_kernels(
    models: dict[str, Any], ids: Tensor, settings: Settings, keys: list[Key]
) -> dict[Key, float]:
    """Seconds of a later token that operators which compute something take, by torch's profiler.

    The median over the tokens of PROFILED runs, in shuffled order. The rest is Python, dispatch,
    views, allocation and guards. Compiled code is compiled again, so that each of its kernels is an
    event of its own.
    """
    torch._dynamo.reset()
    kernel_seconds: dict[Key, list[float]] = {key: [] for key in keys}
    order = random.Random(1)
    with patch.object(inductor.cpp, "enable_kernel_profile", True):
        for key in keys:
            _run(models[key[0]], ids, settings, key)
        for _ in range(PROFILED):
            for key in order.sample(keys, len(keys)):
                with profile(activities=[ProfilerActivity.CPU]) as profiled:
                    _run(models[key[0]], ids, settings, key)
                kernel_seconds[key] += kernels_of_tokens(profiled.events())
    return {key: float(np.median(seconds)) for key, seconds in kernel_seconds.items()}


def kernels_of_tokens(events: Sequence[Any]) -> list[float]:
    """Returns the seconds of kernels between the arrivals of two tokens, from the first one on.

    generate() passes the prompt before the first token, which arrives too.
    """
    _, *arrivals = sorted(e.time_range.start for e in events if e.name == ARRIVED)
    seconds = [0.0] * (len(arrivals) - 1)
    for event in events:
        token = bisect(arrivals, event.time_range.start) - 1
        if 0 <= token < len(seconds) and _computes(event.name):
            seconds[token] += event.self_cpu_time_total / 1e6
    return seconds


def _computes(name: str) -> bool:
    space, _, operator = name.partition("::")
    if space == "fusedops":
        return operator.endswith("_forward")
    if space == "aten":
        return operator not in BOOKKEEPING
    return "cpp_fused" in name  # a kernel that Inductor made


def _row(key: Key, runs_by_key: dict[Key, list[Run]]) -> dict:
    (name, cache), runs = key, runs_by_key[key]
    base, dynamic = runs_by_key[BASE, cache], runs_by_key[BASE, "dynamic"]
    p50, p95, p99 = np.percentile([s for run in runs for s in run.each], [50, 95, 99])
    total, new = float(np.median([run.total for run in runs])), len(runs[0].tokens)
    row: dict[str, Any] = {"contender": name, "rounds": len(runs), "new_tokens": new}
    row |= {"first_token_s": float(np.median([run.first for run in runs]))}
    row |= {"token_p50_s": float(p50), "token_p95_s": float(p95), "token_p99_s": float(p99)}
    row |= {"total_s": total, "tokens_per_s": new / total}
    for what, of in {
        "first_token": lambda run: run.first,
        "token": lambda run: np.median(run.each),
        "total": lambda run: run.total,
    }.items():
        row[f"{what}_ratio"] = paired_ratio([*map(of, base)], [*map(of, runs)])
    token = [[float(np.median(run.each)) for run in some] for some in (dynamic, runs)]
    row["token_ratio_to_dynamic"] = paired_ratio(*token)
    return row | {"equal_tokens": _equal(base[0].tokens, runs[0].tokens)}


def _equal(base: list[int], tokens: list[int]) -> int:
    """Returns how many tokens come before the first difference."""
    same = [a == b for a, b in zip(base, tokens, strict=True)]
    return same.index(False) if False in same else len(same)


def _shown(row: dict) -> str:
    first, *each = (
        f"{row[key] * 1e3:.4g}"
        for key in ("first_token_s", "token_p50_s", "token_p95_s", "token_p99_s")
    )
    return (
        f"  {row['contender']:<26} first {first} ms, {row['first_token_ratio']}; "
        f"each {' / '.join(each)} ms, {row['token_ratio']}, "
        f"to the DynamicCache {row['token_ratio_to_dynamic']}; "
        f"total {row['total_s']:.2f} s, {row['tokens_per_s']:.1f} tokens/s, {row['total_ratio']}; "
        f"outside kernels {row['outside_kernels']:.0%}; "
        f"equal tokens: {row['equal_tokens']} of {row['new_tokens']}; {row['attention']}"
    )
