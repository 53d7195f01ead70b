"""Sweeps four models' training steps over batch sizes: `python -m benchmarks sweep`.

Llama, BERT, GPT-2 and T5 of about 20 million parameters are built from configs. They train with
torch's AdamW, patched and unpatched, in float32 and bfloat16, on 1 to 16 sequences of 256 tokens.
Writes the rows, docs/sweep_models.md and a figure of each sweep.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor

import fusedops
from benchmarks.figures import sweeps
from benchmarks.figures.results import Result
from benchmarks.harness import report
from fusedops.measuring.ratios import Ratio

FIGURES = Path("docs/images")
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
            sweep = fusedops.sweep(
                **trained(name, dtype, settings),
                batch=settings.batches,
                length=settings.length,
                budget_s=budget_s,
                past_knee=True,
            )
            print(f"{name}, {dtype}\n{sweep}", flush=True)
            rows += [{"model": name, "dtype": _dtype(dtype), **row.to_dict()} for row in sweep.rows]
            if not args.quick:
                sweep.plot(FIGURES / f"sweep-{name}-{_dtype(dtype)}.svg")
    verdicts = _goals(rows)
    report.save(args, rows, verdicts, settings=asdict(settings))
    if not args.quick:
        Path(sweeps.PAGE).write_text(sweeps.page(Result(Path(args.json))))
    return int(any(not verdict["met"] for verdict in verdicts))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trained(name: str, dtype: torch.dtype, settings: Settings) -> dict[str, Any]:
    """A model, its optimizer, and `make_batch`: the arguments of `fusedops.sweep`."""
    torch.manual_seed(0)
    config = configs(settings)[name](vocab_size=settings.words)
    model = HEADS.get(name, transformers.AutoModelForCausalLM).from_config(config, dtype=dtype)

    def make_batch(batch: int, length: int | None) -> dict[str, Tensor]:
        ids = torch.randint(settings.words, (batch, length or 1))
        return {"input_ids": ids, "labels": ids}

    optimizer = torch.optim.AdamW(model.parameters())
    return {"make_batch": make_batch, "model": model, "optimizer": optimizer}


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
    return [report.goal(title, "eager", limit, value) for title, (limit, value) in asked.items()]
