"""Times a small Llama's generate(), patched and unpatched: `python -m benchmarks generate`.

A prompt and new tokens, greedy, one sequence, in bfloat16, from the call to the last token. The
weights are random and the same for every contender; contenders alternate. patch's own verify
compares their results. Greedy tokens are counted up to the first difference: two logits within
rounding of each other may change places, and later tokens depend on it.
"""

import random
from argparse import Namespace
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusedops
from benchmarks.harness import report
from fusedops.profiling.timing import paired_ratio

# The kinds that patch skips; None: nothing is patched.
ALL = ("norm", "residual", "attention", "mlp", "rotary", "linear", "loss")
LEFT = {
    "unpatched": None,
    "fusedops, attention alone": tuple(site for site in ALL if site != "attention"),
    "fusedops": (),
}
BASE = "unpatched"
CACHES = {"dynamic": "a DynamicCache", "static": "a StaticCache"}
ATTENTION = ("aten::scaled_dot_product_attention", "fusedops::attention_forward")
SEEN = 128  # tokens that verify compares: the fewest with our attention in a prefill


@dataclass(frozen=True)
class Settings:
    prompt: int = 1024
    new: int = 64
    rounds: int = 5
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

    def end(self) -> None:
        pass


def measure(args: Namespace) -> int:
    """Times every contender with every cache and writes `args.json`. Returns the exit status."""
    settings = QUICK if args.quick else Settings()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, settings.vocabulary, (1, settings.prompt), generator=draw)
    models = {name: _model(settings, left, ids) for name, left in LEFT.items()}
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    rows = []
    for cache, named in CACHES.items():
        title = f"generate of llama bfloat16, {settings.prompt} + {settings.new} tokens, {named}"
        title += f", {threads}, {args.allocator} allocator"
        ran = {name: _ran(model, ids, settings, cache) for name, model in models.items()}
        runs = _interleaved(models, ids, settings, cache)
        print(title, flush=True)
        for name in LEFT:
            rows.append({"title": title, **_row(name, runs), "attention": ran[name]})
            print(_shown(rows[-1]), flush=True)
    report.save(args, rows, [], model=asdict(settings))
    return 0


def _model(settings: Settings, left: tuple[str, ...] | None, ids: Tensor) -> Any:
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
    if left is not None:
        sites: dict[str, Any] = dict.fromkeys(left, False)
        fusedops.patch(model, **sites, verify={"input_ids": ids[:, :SEEN]})
    return model


def _interleaved(
    models: dict[str, Any], ids: Tensor, settings: Settings, cache: str
) -> dict[str, list[Run]]:
    """Returns each contender's runs, one per round, in an order shuffled for each round."""
    runs: dict[str, list[Run]] = {name: [] for name in models}
    order = random.Random(0)
    for _ in range(settings.rounds):
        for name in order.sample(list(models), len(models)):
            runs[name].append(_run(models[name], ids, settings, cache))
    return runs


def _run(model: Any, ids: Tensor, settings: Settings, cache: str) -> Run:
    clock = Clock()
    start = perf_counter()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=settings.new,
        cache_implementation=cache,
        disable_compile=True,
        streamer=clock,
    )
    _, first, *later = clock.times
    each = np.diff([first, *later]).tolist()
    return Run(first - start, each, found[0, ids.shape[1] :].tolist())


def _ran(model: Any, ids: Tensor, settings: Settings, cache: str) -> dict[str, int]:
    """Returns how often each attention function ran in one generate(), which also warms up."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        _run(model, ids, settings, cache)
    return {op.key: op.count for op in profiled.key_averages() if op.key in ATTENTION}


def _row(name: str, found: dict[str, list[Run]]) -> dict:
    runs, base = found[name], found[BASE]
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
        f"each {' / '.join(each)} ms, {row['token_ratio']}; "
        f"total {row['total_s']:.2f} s, {row['tokens_per_s']:.1f} tokens/s, {row['total_ratio']}; "
        f"equal tokens: {row['equal_tokens']} of {row['new_tokens']}; {row['attention']}"
    )
