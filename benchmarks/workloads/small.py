"""Times patched models on few tokens, where overhead dominates: `python -m benchmarks small`.

The models of `python -m benchmarks step`, with fewer layers, run one sequence of a few tokens,
patched and unpatched: a forward without gradients, and a training step with
torch.optim.AdamW(fused=True), in eager and with torch.compile. The benchmark also times patch for a
7B model on the meta device.
"""

import resource
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import perf_counter

import torch
from torch import Tensor, nn

import fusedops
from benchmarks.harness import report
from benchmarks.harness.goals import MS
from benchmarks.harness.timing import interleaved
from benchmarks.workloads.step import EAGER, MODELS, OURS, step, words
from fusedops.measuring.ratios import paired_ratio, spread

LAYERS = 2
TOKENS = 8, 32, 128
QUICK, QUICK_TOKENS = ("llama",), (8,)
AT_LEAST = 0.97
PATCH_MS = 2000
COMPILED = "torch.compile of "


def measure(args: Namespace) -> int:
    """Times every model and writes `args.json`. Returns the exit status."""
    rows, goals = [], [_patch_time()]
    for name in QUICK if args.quick else MODELS:
        for training in (False, True):
            for tokens in QUICK_TOKENS if args.quick else TOKENS:
                what = "training step" if training else "forward"
                title = f"{what} of {name} float32 [1, {tokens}], {args.allocator} allocator"
                torch.compiler.reset()  # else all models share their code's limit of graphs
                calls = dict(_calls(name, training, words(1, tokens), args.compile))
                timed = {contender: (call, nullcontext) for contender, call in calls.items()}
                seconds = interleaved(timed, args.seconds)
                print(title, flush=True)
                for base, ours in _pairs(seconds):
                    ratio = paired_ratio(seconds[base], seconds[ours])
                    goals.append(report.goal(title, f"over {base}", AT_LEAST, ratio))
                    print(f"  {ours:<26} {ratio} over {base}", flush=True)
                rows += [
                    {"title": title, "contender": contender, "median_s": spread(times).median}
                    for contender, times in seconds.items()
                ]
    report.save(args, rows, goals)
    return 0


def _calls(
    name: str, training: bool, ids: Tensor, compiled: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    for compiles in (False, True)[: 1 + compiled]:
        for patched in (False, True):
            torch.manual_seed(0)
            model = MODELS[name](LAYERS).train(training)
            if patched:
                fusedops.patch(model)
            run = torch.compile(model) if compiles else model
            title = OURS if patched else EAGER
            yield COMPILED * compiles + title, _call(run, model, training, ids)


def _call(run: nn.Module, model: nn.Module, training: bool, ids: Tensor) -> Callable[[], object]:
    if training:
        return step(run, ids, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids

    def forward() -> object:
        with torch.no_grad():
            return run(**inputs)

    return forward


def _pairs(seconds: dict[str, list[float]]) -> Iterator[tuple[str, str]]:
    for before in ("", COMPILED):
        if before + OURS in seconds:
            yield before + EAGER, before + OURS


def _patch_time() -> dict:
    """Times patch for a 7B Llama on the meta device, and how much peak memory grows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())  # its sizes are Llama 2 7B's
    before, start = _peak_memory(), perf_counter()
    fusedops.patch(model)
    ms, memory = (perf_counter() - start) * 1e3, _peak_memory() - before
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    title = f"patch of llama on the meta device, {billions:.2f}B parameters"
    print(f"{title}: {ms:.0f} ms, peak memory grew by {memory / 2**20:.0f} MiB", flush=True)
    return report.goal(title, MS, PATCH_MS, ms, at_most=True) | {"memory_bytes": memory}


def _peak_memory() -> int:
    """Returns the process's peak resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
