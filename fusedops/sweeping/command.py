"""`fusedops sweep` and `fusedops bench`: a model of transformers with random weights and tokens."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from fusedops.profiling.command import TRAINED, build, check_folders
from fusedops.profiling.planning.models import check_positions
from fusedops.sweeping import figure
from fusedops.sweeping.choice import named
from fusedops.sweeping.result import Sweep
from fusedops.sweeping.run import sweep

__all__ = ["bench", "random_tokens", "sweep_model"]

COMPARED = ("eager", "compiled", "patched")


def sweep_model(args: argparse.Namespace) -> Sweep:
    """Sweeps the model that the command line names, prints the table, and writes the files."""
    check_folders("sweep", json=args.json, plot=args.plot)
    if args.plot:
        figure.check(args.plot)
    if args.p95 is not None and not args.p95 > 0:
        raise ValueError(f"sweep: p95 must be more than 0 seconds, got {args.p95}")
    found = _swept(args, "sweep", past_knee=args.past_knee)
    print(found)
    if args.json:
        found.save(args.json)
    if args.p95 is not None:
        try:
            best = found.best(args.p95)
        except ValueError as error:
            print(error, file=sys.stderr)
        else:
            print(f"most throughput within {args.p95:g} s: {named(best)}")
    if args.plot:
        found.plot(args.plot, p95=args.p95)
    return found


def bench(args: argparse.Namespace) -> Sweep:
    """Compares eager, compiled and patched at one batch and length; prints one table."""
    check_folders("bench", json=args.json)
    args.batch, args.length, args.variants = [args.batch], [args.length], list(COMPARED)
    found = _swept(args, "bench", past_knee=True)
    print(found)
    if args.json:
        found.save(args.json)
    return found


def _swept(args: argparse.Namespace, caller: str, past_knee: bool) -> Sweep:
    model = build(args.model, args.dtype, caller, TRAINED if args.mode == "train" else 1)
    check_positions(model, max(args.length) + args.new_tokens * (args.mode == "generate"), caller)
    if args.mode == "generate":  # `build` makes models that train, without a cache
        model.config.use_cache = model.generation_config.use_cache = True
    trained = model.parameters() if args.mode == "train" else None
    return sweep(
        random_tokens(model),
        model=model,
        optimizer=None if trained is None else torch.optim.AdamW(trained, lr=1e-5),
        batch=args.batch,
        length=args.length,
        mode=args.mode,
        variants=args.variants,
        budget_s=args.budget,
        new_tokens=args.new_tokens,
        past_knee=past_knee,
    )


def random_tokens(model: Any) -> Callable[[int, int | None], dict[str, torch.Tensor]]:
    """A make_batch of tokens without padding, which are their own labels."""

    def make_batch(batch: int, length: int | None) -> dict[str, torch.Tensor]:
        assert length is not None
        ids = torch.randint(model.config.vocab_size, (batch, length), device="cpu")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return make_batch
