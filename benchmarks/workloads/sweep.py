"""Sweeps training steps of four models, patched and unpatched: `python -m benchmarks sweep`.

Llama, BERT, GPT-2 and T5 of about 20 million parameters, built from configs, in float32 and
bfloat16, batches of 1 to 16 sequences of 256 tokens, with torch's AdamW. Writes the rows,
docs/sweep_models.md and a figure of each sweep. Then each float32 model is swept within 1 GiB, and
every point that was skipped runs in a process of its own, which measures its peak.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

import fusedops
from benchmarks.figures.results import Result
from benchmarks.figures.sweeps import LIMIT, PAGE, page
from benchmarks.harness import goals, report
from fusedops.profiling.timing import Ratio
from fusedops.sweeping.result import Sweep

FIGURES = Path("docs/images")
NEAR = 0.15  # the largest error of a skipped point's prediction
LEAST, MEDIAN = 1.0, 1.15  # of an interval's upper end at each point; of the median over points


@dataclass(frozen=True)
class Settings:
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    length: int = 256
    hidden: int = 384
    layers: int = 8
    words: int = 8192
    budget_s: float = 200.0  # of a model in float32; bfloat16 takes three fifths


QUICK = Settings(batches=(1, 2), length=16, hidden=64, layers=2, words=256, budget_s=4.0)


def configs(settings: Settings) -> dict[str, Callable[..., Any]]:
    hidden, layers = settings.hidden, settings.layers
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
    }
    t5 = {"d_model": hidden, "d_kv": 64, "d_ff": 4 * hidden, "num_heads": hidden // 64}
    return {
        "llama": partial(transformers.LlamaConfig, intermediate_size=8 * hidden // 3, **sizes),
        "gpt2": partial(
            transformers.GPT2Config, n_embd=hidden, n_layer=layers, n_head=hidden // 64
        ),
        "bert": partial(transformers.BertConfig, intermediate_size=4 * hidden, **sizes),
        "t5": partial(
            transformers.T5Config, num_layers=layers // 2, decoder_start_token_id=0, **t5
        ),
    }


HEADS = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}


def measure(args: Namespace) -> int:
    """Sweeps each model in each dtype. Returns the exit status: 1 if a goal is missed."""
    settings = QUICK if args.quick else Settings()
    rows: list[dict] = []
    for name in configs(settings):
        for dtype in (torch.float32, torch.bfloat16):
            budget_s = settings.budget_s * (1 if dtype == torch.float32 else 0.6)
            found = _swept(name, dtype, settings, budget_s=budget_s)
            print(f"{name}, {dtype}\n{found}", flush=True)
            rows += [{"model": name, "dtype": _dtype(dtype), **row.to_dict()} for row in found.rows]
            if not args.quick:
                found.plot(FIGURES / f"sweep-{name}-{_dtype(dtype)}.svg")
    skipped = [] if args.quick else [*_skipped(settings)]
    verdicts = [*_goals(rows), *_memory_goals(skipped)]
    report.save(args, rows, verdicts, settings=asdict(settings), skipped=skipped)
    if not args.quick:
        Path(PAGE).write_text(page(Result(Path(args.json))))
    return int(any(not verdict["met"] for verdict in verdicts))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _swept(name: str, dtype: torch.dtype, settings: Settings, **more: Any) -> Sweep:
    torch.manual_seed(0)
    config = configs(settings)[name](vocab_size=settings.words)
    model = HEADS.get(name, transformers.AutoModelForCausalLM).from_config(config, dtype=dtype)

    def make_batch(batch: int, length: int | None) -> dict[str, Tensor]:
        ids = torch.randint(settings.words, (batch, length or 1))
        return {"input_ids": ids, "labels": ids}

    return fusedops.sweep(
        make_batch,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        length=settings.length,
        past_knee=True,
        **{"batch": settings.batches, "budget_s": settings.budget_s, **more},
    )


def _skipped(settings: Settings) -> Iterator[dict]:
    """Each point that a sweep within LIMIT skips: its predicted peak, and the measured one."""
    for name in configs(settings):
        small = {"batch": (1, 2, 4, 16), "budget_s": 60.0, "memory_limit": LIMIT}
        found = _swept(name, torch.float32, settings, **small)
        for row in found.rows:
            if row.skipped_reason.startswith("its predicted peak"):
                peak = _peak(name, row.variant, row.batch)
                point = {"model": name, "variant": row.variant, "batch": row.batch}
                yield point | {"predicted_bytes": row.predicted_bytes, "peak_bytes": peak}


def _peak(name: str, variant: str, batch: int) -> int:
    """The peak of one point, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.workloads.sweep", name, variant, str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(run.stdout.splitlines()[-1])


def _child(name: str, variant: str, batch: str) -> None:
    more = {"batch": (int(batch),), "variants": (variant,), "budget_s": 1.0}
    transformers.logging.set_verbosity_error()
    (row,) = _swept(name, torch.float32, Settings(), **more).rows
    print(row.peak_bytes)


def _memory_goals(skipped: Sequence[dict]) -> list[dict]:
    if not skipped:
        return []
    errors = [abs(row["predicted_bytes"] / row["peak_bytes"] - 1) for row in skipped]
    title = f"largest error of {len(errors)} skipped points' predicted peaks"
    found = {"title": title, "what": goals.SHARE, "asked": NEAR, "measured": max(errors)}
    return [found | {"met": max(errors) <= NEAR}]


def _goals(rows: list[dict]) -> list[dict]:
    """The least upper end of an interval, and the median ratio, over all points."""
    ratios = [Ratio(*row["ratio"]) for row in rows if row["ratio"] is not None]
    if not ratios:
        return []
    least, middle = min(r.high for r in ratios), median(r.median for r in ratios)
    asked = {
        "least upper end of an interval": (LEAST, least),
        "median over points": (MEDIAN, middle),
    }
    return [
        {
            "title": title,
            "what": "eager",
            "asked": wanted,
            "measured": found,
            "met": found >= wanted,
        }
        for title, (wanted, found) in asked.items()
    ]


if __name__ == "__main__":
    _child(*sys.argv[1:])
