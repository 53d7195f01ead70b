"""`fusedops sweep` and `fusedops bench`: time a transformers model with random weights."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from fusedops.measured import remember
from fusedops.measuring.arguments import check_folders, check_positive
from fusedops.profiling.command import TRAINED, build
from fusedops.profiling.planning.models import check_positions
from fusedops.sweeping import figure
from fusedops.sweeping.arguments import SweepRequest
from fusedops.sweeping.choice import named
from fusedops.sweeping.result import Sweep
from fusedops.sweeping.run import measure

__all__ = ["bench", "random_tokens", "sweep_model"]

COMPARED = ("eager", "compiled", "patched")


def sweep_model(args: argparse.Namespace) -> Sweep:
    """Sweeps the model that the command line names, prints the table, and writes the files."""
    check_folders("sweep", json=args.json, plot=args.plot)
    if args.plot:
        figure.check(args.plot)
    if args.p95 is not None:
        check_positive("sweep", "p95", args.p95)
    swept = _swept(args, "sweep", past_knee=args.past_knee)
    print(swept)
    if args.json:
        swept.save(args.json)
    if args.p95 is not None:
        try:
            best = swept.best(args.p95)
        except ValueError as error:
            print(error, file=sys.stderr)
        else:
            print(f"most throughput within {args.p95:g} s: {named(best)}")
    if args.plot:
        swept.plot(args.plot, p95=args.p95)
    return swept


def bench(args: argparse.Namespace) -> Sweep:
    """Compares eager, compiled and patched at one batch and length; prints one table.

    It notes in the cache folder which device it has measured. Raises ValueError for a device that
    torch does not find.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"bench: device must be one that torch finds, got {args.device}")
    check_folders("bench", json=args.json)
    args.batch, args.length, args.variants = [args.batch], [args.length], list(COMPARED)
    swept = _swept(args, "bench", past_knee=True, device=args.device)
    print(swept)
    device, date = str(swept.about["device"]), str(swept.about["date"])
    try:
        remember(device, date)
    except (OSError, RuntimeError) as error:
        print(f"bench: patch will not know that {device} was measured: {error}", file=sys.stderr)
    if args.json:
        swept.save(args.json)
    return swept


def _swept(args: argparse.Namespace, caller: str, past_knee: bool, device: str = "cpu") -> Sweep:
    copies = TRAINED if args.mode == "train" and device == "cpu" else 1
    model = build(args.model, args.dtype, caller, copies)
    check_positions(model, max(args.length) + args.new_tokens * (args.mode == "generate"), caller)
    if args.mode == "generate":  # `build` makes models that train, without a cache
        model.config.use_cache = model.generation_config.use_cache = True
    model.to(device)
    trained = model.parameters() if args.mode == "train" else None
    request = SweepRequest(
        random_tokens(model),
        model,
        None,
        None if trained is None else torch.optim.AdamW(trained, lr=1e-5),
        args.batch,
        args.length,
        args.mode,
        args.variants,
        args.budget,
        new_tokens=args.new_tokens,
        on_gpu=device == "cuda",
    )
    return measure(request, past_knee)


def random_tokens(model: Any) -> Callable[[int, int | None], dict[str, torch.Tensor]]:
    """A make_batch of tokens without padding, which are their own labels."""

    def make_batch(batch: int, length: int | None) -> dict[str, torch.Tensor]:
        assert length is not None
        ids = torch.randint(model.config.vocab_size, (batch, length), device="cpu").to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    return make_batch
