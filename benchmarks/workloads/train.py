"""Times a one-billion-parameter Llama's training step: `python -m benchmarks train`.

It trains on a GPU in bfloat16, on one sequence and on eight, of 2048 tokens of the standard
library's source each. Contenders run forward, loss, backward and torch.optim.AdamW(fused=True),
which keeps its state in the parameters' dtype: the unpatched model, Liger's kernels, torch.compile
and ours, and one more that is ours with fusedops' AdamW. Each has its own process, so that it has
all the memory, and because Liger replaces functions that all models share. Contenders that run out
of memory are skipped. Without a GPU, the model is tiny, to test that everything runs.
"""

import json
import multiprocessing
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import fusedops
from benchmarks.harness import report
from benchmarks.harness.case import Skip, find
from benchmarks.workloads.step import COMPILED, EAGER, OURS, WHOLE, step, words

LIGER = "liger"
BATCHES, SEQUENCE, VOCABULARY = (1, 8), 2048, 128256
STEPS = 2, 12  # untimed and timed steps
# Modules that each contender's process starts with. None of them initialises CUDA.
PRELOADED = ["benchmarks.workloads.train", "transformers.models.llama.modeling_llama"]
BILLION = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def measure(args: Namespace) -> int:
    """Prints each row when it is measured, writes `args.json`; returns 1 if a goal was missed."""
    rows = []
    for batch in BATCHES:
        for name in _contenders(args.compile):
            rows.append(_apart(name, batch, args.threads))
            print(json.dumps(rows[-1]), flush=True)
    goals = _goals(rows)
    report.save(args, rows, goals, _device())
    return int(any(not goal["met"] for goal in goals))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _apart(name: str, batch: int, threads: int) -> dict:
    """A row from a new process, which starts with the imports that all rows share."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as child:
        try:
            return child.submit(_row, name, batch, threads).result()
        except BrokenProcessPool:
            return _about(name, batch) | {"skipped": "its process died"}


def _about(name: str, batch: int) -> dict[str, Any]:
    tokens = SEQUENCE if _device().type == "cuda" else 16
    return {"title": f"training step of llama bfloat16 {[batch, tokens]}", "contender": name}


def _row(name: str, batch: int, threads: int) -> dict:
    """Returns a contender's times and memory, or why it was skipped."""
    torch.set_num_threads(threads)
    device, row = _device(), _about(name, batch)
    ids = words(batch, SEQUENCE if device.type == "cuda" else 16).to(device)
    try:
        run = _step(_contenders(True)[name], ids)
        seconds = [_timed(run) for _ in range(sum(STEPS))][STEPS[0] :]
    except (Skip, RuntimeError, TypeError, TorchDynamoException) as error:  # another Liger
        return row | {"skipped": f"{type(error).__name__}: {error}".partition("\n")[0]}
    row |= report.times(seconds)
    row["tokens_per_s"] = ids.numel() / row["median_s"]
    return row | ({"peak_bytes": torch.cuda.max_memory_allocated()} if ids.is_cuda else {})


def _timed(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def _contenders(compiled: bool) -> dict[str, Callable[[nn.Module], Any]]:
    """Returns functions that prepare a model and return the call and the optimizer class."""
    usual = partial(torch.optim.AdamW, fused=True)
    prepare: dict[str, Callable[[nn.Module], Any]] = {
        EAGER: lambda model: (model, usual),
        OURS: lambda model: (_patched(model), usual),
        WHOLE: lambda model: (_patched(model), fusedops.optim.AdamW),
        LIGER: lambda model: (_with_liger(model), usual),
    }
    return prepare | ({COMPILED: lambda model: (torch.compile(model), usual)} if compiled else {})


def _patched(model: nn.Module) -> nn.Module:
    fusedops.patch(model)
    return model


def _with_liger(model: nn.Module) -> nn.Module:
    if not torch.cuda.is_available():
        raise Skip("its kernels need a GPU")
    find("liger_kernel.transformers", "apply_liger_kernel_to_llama")(model=model)
    return model


def _step(ready: Callable[[nn.Module], Any], ids: Tensor) -> Callable[[], None]:
    """Returns a step that ends when the device is done."""
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = ids.is_cuda
    sizes = BILLION | HEADS if on_gpu else TINY | TINY_HEADS
    torch.manual_seed(0)
    with ids.device:
        plain = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY if on_gpu else 8192, **sizes))
    model, optimizer = ready(plain.bfloat16().train())
    run = step(model, ids, optimizer(plain.parameters(), lr=1e-4))

    def whole() -> None:
        run()
        if on_gpu:
            torch.cuda.synchronize()

    return whole


def _goals(rows: list[dict]) -> list[dict]:
    """With one sequence, ours must be faster than every other, and not skipped."""
    single = [row for row in rows if row["title"] == rows[0]["title"]]
    tokens = {row["contender"]: row["tokens_per_s"] for row in single if "skipped" not in row}
    ours = tokens.get(OURS)
    return [
        {"title": rows[0]["title"], "what": f"over {name}", "asked": 1}
        | {"measured": ours and ours / theirs, "met": ours is not None and ours > theirs}
        for name, theirs in tokens.items()
        if name not in (OURS, WHOLE)
    ]
