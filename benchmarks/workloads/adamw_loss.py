"""Compares losses of AdamW's parameter and state formats: `python -m benchmarks adamw-loss`.

Trains a small Llama on the bytes of the standard library's source. Every contender has the same
initial weights, the same batches, and a learning rate that warms up and decays to zero. The loss is
then measured on batches that another seed draws from the same text. Each of three seeds gives other
weights and batches.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from statistics import mean, stdev

import torch
from torch import Tensor, nn

from benchmarks.harness import report
from fusedops.demo.training import Settings, batches, build_model
from fusedops.optim import AdamW, AdamW8bit

SETTINGS = Settings(steps=600, batch=8, length=64, hidden=128, layers=3, lr=5e-4)
QUICK = Settings(steps=4, batch=2, length=16, hidden=64, layers=1, lr=1e-3)
SEEDS = (0, 1, 2)
EVALUATED = 40  # batches
WARMUP = 0.05  # fraction of the steps

Make = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]

FLOAT32 = "torch float32"
CONTENDERS: dict[str, tuple[torch.dtype, Make]] = {
    FLOAT32: (torch.float32, torch.optim.AdamW),
    "fusedops float32": (torch.float32, AdamW),
    "fusedops int8": (torch.float32, AdamW8bit),
    "torch bfloat16": (torch.bfloat16, torch.optim.AdamW),
    "fusedops bfloat16": (torch.bfloat16, AdamW),
    "fusedops bfloat16, int8": (torch.bfloat16, AdamW8bit),
    "fusedops bfloat16 and remainder, int8": (
        torch.bfloat16,
        lambda params, lr: AdamW8bit(params, lr, master_weights="remainder"),
    ),
}
# Ours -> allowed difference of its mean from torch's float32; None: the seeds' spread.
AT_MOST = {
    "fusedops int8": None,
    "fusedops bfloat16": 0.005,
    "fusedops bfloat16, int8": 0.005,
}


def measure(args: Namespace) -> int:
    """Trains every contender with every seed and writes `args.json`. Returns the exit status."""
    settings, seeds = (QUICK, SEEDS[:2]) if args.quick else (SETTINGS, SEEDS)
    losses: dict[str, list[float]] = {}
    for name, (dtype, make) in CONTENDERS.items():
        losses[name] = [_trained(settings, seed, dtype, make) for seed in seeds]
        print(f"{name}: {_shown(losses[name])}", flush=True)
    rows = [
        {"contender": name, "losses": finals, "mean": mean(finals), "spread": stdev(finals)}
        for name, finals in losses.items()
    ]
    goals = [_verdict(name, losses) for name in AT_MOST]
    for goal in goals:
        print(f"{goal['title']}: {goal['measured']:+.4f} nats, allowed {goal['asked']:.4f}")
    report.save(args, rows, [], differences=goals, settings=vars(settings))
    return int(not all(goal["met"] for goal in goals))


def _verdict(name: str, losses: dict[str, list[float]]) -> dict:
    """Returns the mean of the per-seed differences, and the limit."""
    base, compared = losses[FLOAT32], losses[name]
    difference = mean(compared) - mean(base)
    allowed = AT_MOST[name]
    allowed = stdev(base) if allowed is None else allowed
    return report.goal(f"{name} against {FLOAT32}", "mean", allowed, difference, at_most=True)


def _shown(losses: list[float]) -> str:
    each = ", ".join(f"{loss:.4f}" for loss in losses)
    return f"{mean(losses):.4f} nats a byte ({each})"


def _trained(settings: Settings, seed: int, dtype: torch.dtype, make: Make) -> float:
    """Returns the loss after training, on batches that another seed draws."""
    settings = Settings(**vars(settings) | {"seed": seed})
    model = build_model(settings).to(dtype)
    optimizer = make(list(model.parameters()), settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: _rate(i, settings.steps))
    for tokens in batches(settings):
        optimizer.zero_grad()
        _loss(model, tokens).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    others = Settings(**vars(settings) | {"seed": 1000, "steps": EVALUATED})
    with torch.no_grad():
        return mean(_loss(model, tokens).item() for tokens in batches(others))


def _rate(step: int, steps: int) -> float:
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
