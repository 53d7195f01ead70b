"""`fusedops memory`: prints a step's predicted memory per rank, or writes it as JSON."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fusedops.measuring.arguments import check_folders
from fusedops.measuring.memory.allocations import CATEGORIES
from fusedops.measuring.memory.memory_use import mebibytes
from fusedops.profiling.planning.plan import MemoryPlan, plans
from fusedops.profiling.planning.request import Request

__all__ = ["run"]

NOT_COUNTED = "not counted: data and its loader, autocast's copies, memory inside operators' calls"


def run(args: argparse.Namespace) -> None:
    """Prints the plan, or one column for each number of ranks; with --json their numbers."""
    check_folders("memory", json=args.json)
    worlds = _worlds(args.world)
    asked = Request(
        batch=args.batch,
        length=args.length,
        mode=args.mode,
        optimizer=None if args.optimizer == "none" else args.optimizer,
        dtype=args.dtype,
        checkpoint=args.checkpoint,
        patched=args.patched,
        quantize=args.quantize,
        lora_rank=args.lora_rank,
        strategy=args.strategy,
    )
    computed = plans(args.model, asked, worlds)
    if args.json is None:
        print(computed[0] if len(computed) == 1 else _columns(computed, worlds))
        print(NOT_COUNTED)
        return
    numbers = [
        plan.to_dict() | {"world": world} for plan, world in zip(computed, worlds, strict=True)
    ]
    text = json.dumps(numbers[0] if len(numbers) == 1 else numbers, indent=1)
    if args.json == "-":
        sys.stdout.write(f"{text}\n")
    else:
        Path(args.json).write_text(f"{text}\n")


def _worlds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        what = "a number of ranks or several with commas between them"
        raise ValueError(f"memory: world must be {what}, got {text!r}") from error


def _columns(computed: Sequence[MemoryPlan], worlds: Sequence[int]) -> str:
    wide = max(map(len, CATEGORIES))
    lines = [
        computed[-1].title,
        f"{'MiB per rank of':{wide}}" + "".join(f"{n:>14}" for n in worlds),
    ]
    for name in (*CATEGORIES, "peak"):
        values = (mebibytes(getattr(plan, name)) for plan in computed)
        lines.append(f"{name:{wide}}" + "".join(f"{value:>14}" for value in values))
    return "\n".join(lines)
