"""Compares processes' resident memory with its prediction: `python -m benchmarks process-memory`.

Each row trains a model from a config for some steps in a process with one thread, and the tuned
rows in one with two. `fusedops memory` predicts them in another. The growth is the most that a
process holds, less what it held before it made the model.
"""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import fusedops
from benchmarks.harness import goals, report
from fusedops.profiling.planning.heap import STEPS
from fusedops.profiling.planning.process import FIRST_STEP, resident

CHILD = "benchmarks.workloads.process_memory"
NEAR = 0.1  # the largest error
THREADS = 1, 2  # of the processes of a tuned row
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adamw8bit": fusedops.optim.AdamW8bit}


@dataclass(frozen=True)
class Model:
    family: str
    hidden: int
    layers: int
    words: int
    batch: int
    length: int
    dtype: str = "float32"
    checkpoint: bool = False

    def config(self) -> Any:
        name, wide = FAMILIES[self.family]
        sizes = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "vocab_size": self.words,
            "intermediate_size": int(wide * self.hidden),
            "architectures": [name],
        }
        return transformers.AutoConfig.for_model(self.family, **sizes)


# The class, and the width of its MLP over the model's.
FAMILIES = {
    "bert": ("BertForMaskedLM", 4),
    "gpt2": ("GPT2LMHeadModel", 4),  # which takes its MLP's width as n_inner, 4 by default
    "llama": ("LlamaForCausalLM", 8 / 3),
}


# Model, whether it is patched, its optimizer.
SMALLEST = Model("llama", 256, 4, 4096, 4, 128), True, "adamw8bit"
LARGE = Model("llama", 1152, 18, 8192, 2, 256, "bfloat16")
ROWS = [
    (Model("llama", 256, 4, 4096, 4, 128), False, "adamw"),
    SMALLEST,
    (Model("bert", 512, 8, 16000, 4, 128), False, "adamw"),
    (Model("bert", 512, 8, 16000, 4, 128), True, "adamw8bit"),
    (LARGE, False, "adamw"),
    (LARGE, True, "adamw8bit"),
    (Model("bert", 256, 6, 8192, 8, 128), True, "adamw"),
    (Model("bert", 256, 6, 8192, 8, 128), False, "adamw8bit"),
    (Model("llama", 768, 10, 16000, 2, 256), True, "adamw"),
    (Model("llama", 768, 10, 16000, 2, 256), False, "adamw8bit"),
    (Model("bert", 768, 12, 30522, 2, 256), True, "adamw"),
    (Model("bert", 768, 12, 30522, 2, 256), False, "adamw8bit"),
]
# The prediction's constants were chosen before any of these was measured.
HELD_OUT = [
    (Model("llama", 192, 6, 6000, 8, 64), False, "adamw8bit"),
    (Model("llama", 320, 12, 12000, 2, 192), True, "adamw"),
    (Model("llama", 640, 16, 20000, 1, 384), False, "adamw"),
    (Model("llama", 1024, 20, 12000, 1, 512, "bfloat16"), True, "adamw8bit"),
    (Model("llama", 512, 24, 8000, 4, 256, checkpoint=True), False, "adamw"),
    (Model("bert", 320, 10, 10000, 6, 96), True, "adamw8bit"),
    (Model("bert", 384, 4, 30000, 16, 64), False, "adamw"),
    (Model("bert", 896, 8, 16000, 2, 384), False, "adamw8bit"),
    (Model("bert", 1024, 16, 28000, 1, 256), True, "adamw"),
    (Model("gpt2", 448, 9, 14000, 3, 160), False, "adamw"),
    (Model("gpt2", 768, 6, 24000, 2, 320), True, "adamw8bit"),
]


def measure(args: Namespace) -> int:
    """Returns the exit status: 1 if a prediction is too far off."""
    rows = []
    for held_out, configurations in ((False, ROWS), (True, HELD_OUT)):
        threads = THREADS[:1] if held_out else THREADS
        for configuration in configurations[:1] if args.quick else configurations:
            rows.append({"held_out": held_out} | row(*configuration, threads))
            print(rows[-1], flush=True)
    errors = [*_errors(rows)]
    spread = max(max(row["growth"]) / min(row["growth"]) - 1 for row in rows)
    summaries = [*errors, {"title": "processes of a row", "spread": spread}]
    verdicts = [
        report.goal(f"{summary['title']}, {key}", goals.SHARE, NEAR, summary[key], at_most=True)
        for summary in errors
        for key in ("growth_error", "resident_error")
    ]
    report.save(args, rows + summaries, verdicts)
    return int(any(not verdict["met"] for verdict in verdicts))


def row(
    model: Model, patched: bool, optimizer: str, threads: Sequence[int] = THREADS
) -> dict[str, Any]:
    """The prediction, and what a process for each number of threads held."""
    plan = _predicted(model, patched, optimizer)
    if plan["allocator"] is None:
        raise SystemExit("process-memory: needs Linux and glibc's malloc")
    runs = [_measured(model, patched, optimizer, number) for number in threads]
    return {
        "model": asdict(model),
        "patched": patched,
        "optimizer": optimizer,
        "parameters": runs[0]["parameters"],
        "peak_bytes": plan["peak"],
        "predicted_growth": plan["peak"] + plan["allocator"] + FIRST_STEP,
        "predicted_resident": plan["resident"],
        "growth": [run["growth"] for run in runs],
        "resident": [run["resident"] for run in runs],
    }


def _predicted(model: Model, patched: bool, optimizer: str) -> dict:
    """What `fusedops memory` says of a training step."""
    with TemporaryDirectory() as folder:
        model.config().save_pretrained(folder)
        options = {"batch": model.batch, "length": model.length, "dtype": model.dtype}
        words = [f"--{name}={value}" for name, value in options.items()]
        words += ["--optimizer", optimizer, *["--patched"] * patched]
        words += [*["--checkpoint"] * model.checkpoint, "--json"]
        return json.loads(_printed("fusedops", "memory", folder, *words))


def _measured(model: Model, patched: bool, optimizer: str, threads: int) -> dict:
    """A process's parameters, growth and most resident bytes."""
    asked = json.dumps([asdict(model), patched, optimizer, threads])
    return json.loads(_printed(CHILD, asked).splitlines()[-1])


def _printed(*words: str) -> str:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _child(fields: dict, patched: bool, optimizer_name: str, threads: int) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    asked = Model(**fields)
    config = asked.config()
    cls = getattr(transformers, config.architectures[0])
    before = resident() or 0
    model = cls._from_config(config, dtype=getattr(torch, asked.dtype)).train()
    if asked.checkpoint:
        model.activation_checkpointing_enable()
    if patched:
        fusedops.patch(model)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    ids = torch.randint(5, asked.words, (asked.batch, asked.length))
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    most = _most_resident()
    count = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": count, "growth": most - before, "resident": most}))


def _most_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _errors(rows: Sequence[dict]) -> Iterator[dict]:
    """The largest errors of tuned and of held-out configurations, by number of threads."""
    for held_out, (place, number) in product((False, True), enumerate(THREADS)):
        kind = [r for r in rows if r["held_out"] == held_out and len(r["growth"]) > place]
        if not kind:
            continue
        growth, resident = (
            [abs(row[f"predicted_{what}"] / row[what][place] - 1) for row in kind]
            for what in ("growth", "resident")
        )
        yield {
            "title": f"{'held-out' if held_out else 'tuned'}, {number} thread{'s' * (number > 1)}",
            "configurations": len(kind),
            "near": sum(error <= NEAR for error in growth),
            "growth_error": max(growth),
            "resident_error": max(resident),
        }


if __name__ == "__main__":
    _child(*json.loads(sys.argv[1]))
