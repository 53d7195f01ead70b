"""Times small mixtures of experts, patched and unpatched: `python -m benchmarks mixtures`.

A Qwen3-MoE and a gpt-oss in bfloat16 generate one sequence greedily. The Qwen3-MoE also trains with
torch.optim.AdamW(fused=True), in float32 and bfloat16. The unpatched model runs each of
transformers' implementations in turn, and each has its own goal. Training leaves out eager: its
gradient of one expert is as large as all experts, which takes ten to twenty times as long as
grouped_mm. patch's verify does not run: a router picks another expert where two scores differ by
rounding.
"""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import fusedops
from benchmarks.harness import report
from benchmarks.harness.timing import interleaved
from benchmarks.workloads.step import step, words
from fusedops.measuring.ratios import paired_ratio

THEIRS = "eager", "grouped_mm", "batched_mm"
OURS, NF4 = "fusedops", "fusedops, nf4"
PROMPT, NEW = 32, 32
TOKENS = 256  # of a training step
LAYERS, VOCABULARY = 2, 8192
ASKED = {OURS: 1.7, NF4: 3.0}
TRAINING = 1.5
MOST_COPIED = 1 << 30  # bytes of weights that batched_mm may copy

SIZES = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
QUICK = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
EXPERTS = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 1024},
}
QUICK_EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
}

Call = Callable[[], object]


def measure(args: Namespace) -> int:
    """Times every model and writes `args.json`. Returns the exit status."""
    rows: list[dict] = []
    goals: list[dict] = []
    new, prompt = (4, 8) if args.quick else (NEW, PROMPT)
    for name in EXPERTS:
        calls = dict(_generating(name, words(1, prompt), new, args.quick))
        title = f"generate of {name} bfloat16, {prompt} + {new} tokens, {args.allocator} allocator"
        _time(title, calls, ASKED, args.seconds, rows, goals)
    ids = words(1, 16 if args.quick else TOKENS)
    for dtype in (torch.float32, torch.bfloat16):
        calls = dict(_training(ids, dtype, args.quick))
        kind = str(dtype).removeprefix("torch.")
        title = f"training step of qwen3_moe {kind} {list(ids.shape)}, {args.allocator} allocator"
        _time(title, calls, {OURS: TRAINING}, args.seconds, rows, goals)
    report.save(args, rows, goals)
    return 0


def _time(
    title: str,
    calls: dict[str, Call],
    asked: dict[str, float],
    budget_s: float,
    rows: list[dict],
    goals: list[dict],
) -> None:
    """Appends a row for each call, and a goal for each of ours over each of theirs."""
    seconds = interleaved({name: (call, nullcontext) for name, call in calls.items()}, budget_s)
    print(title, flush=True)
    for name, times in seconds.items():
        ratios = {base: paired_ratio(seconds[base], times) for base in THEIRS if base in seconds}
        row = {"title": title, "contender": name, "rounds": len(times), **report.times(times)}
        rows.append(row | {f"over_{base}": ratio for base, ratio in ratios.items()})
        shown = ", ".join(f"{ratio} over {base}" for base, ratio in ratios.items())
        print(f"  {name:<16} {row['median_s'] * 1e3:8.1f} ms; {shown}", flush=True)
        goals += [
            report.goal(title, f"{name} over {base}", asked[name], ratio)
            for base, ratio in ratios.items()
            if name in asked
        ]
    calls.clear()
    gc.collect()


def _model(name: str, dtype: torch.dtype, quick: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = QUICK | QUICK_EXPERTS[name] if quick else SIZES | EXPERTS[name]
    # Without an end, or a random model may stop early.
    sizes |= {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "eos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config).to(dtype)


def _generating(name: str, ids: Tensor, new: int, quick: bool) -> Iterator[tuple[str, Call]]:
    def generate(model: Any) -> Call:
        options = {
            "do_sample": False,
            "max_new_tokens": new,
            "attention_mask": torch.ones_like(ids),
        }
        return lambda: model.generate(ids, **options)

    plain = _model(name, torch.bfloat16, quick).eval()
    for implementation in THEIRS:
        yield implementation, _chosen(plain, implementation, generate(plain))
    for contender, format in ((OURS, None), (NF4, "nf4")):
        model = _model(name, torch.bfloat16, quick).eval()
        fusedops.patch(model, quantize=format)
        yield contender, generate(model)


def _training(ids: Tensor, dtype: torch.dtype, quick: bool) -> Iterator[tuple[str, Call]]:
    def made(patched: bool) -> tuple[Any, Call]:
        model = _model("qwen3_moe", dtype, quick).train()
        if patched:
            fusedops.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return model, step(model, ids, optimizer)

    plain, run = made(patched=False)
    experts = plain.model.layers[0].mlp.experts
    expert_bytes = sum(p[0].nbytes for p in experts.parameters())
    copied = ids.numel() * plain.config.num_experts_per_tok * expert_bytes
    for implementation in THEIRS[1:]:
        if implementation != "batched_mm" or copied <= MOST_COPIED:
            yield implementation, _chosen(plain, implementation, run)
    yield OURS, made(patched=True)[1]


def _chosen(model: Any, implementation: str, run: Call) -> Call:
    """The call with one of transformers' implementations; setting it takes microseconds."""

    def call() -> object:
        model.set_experts_implementation(implementation)
        return run()

    return call
