"""`fusedops tune`: tunes a transformers model with random weights on random tokens."""

import argparse

import torch

from fusedops.measuring.arguments import check_folders
from fusedops.profiling.command import build
from fusedops.profiling.planning.models import check_positions
from fusedops.sweeping.command import random_tokens
from fusedops.tuning.run import tune
from fusedops.tuning.trial import Tuning

__all__ = ["tune_model"]


def tune_model(args: argparse.Namespace) -> Tuning:
    """Tunes the model that the command line names, with AdamW; prints trials and code."""
    check_folders("tune", json=args.json)
    model = build(args.model, args.dtype, "tune")
    check_positions(model, args.length, "tune")
    tuning = tune(
        random_tokens(model),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
        batch=args.batch,
        length=args.length,
        goal=args.goal,
        p95=args.p95,
        memory=args.memory,
        knobs=args.knobs,
        budget_s=args.budget,
    )
    print(tuning)
    if args.json:
        tuning.save(args.json)
    return tuning
