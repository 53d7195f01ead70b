"""Patches a tiny model of every family of transformers: `python -m checks families`."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from checks.families import sweep, table
from checks.families.families import KINDS
from checks.families.judge import Row
from checks.families.planned import judge_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("family", nargs="*", help="families, by their model_type (default all)")
    add("--kind", action="append", default=[], choices=KINDS, help="may be repeated")
    add("--json", type=Path, help="file for the rows; families already in it are skipped")
    add("--markdown", type=Path, help="file for the table")
    add("--seconds-per-family", type=float, default=120.0, help="then it is killed; %(default)g")
    add("--memory", action="store_true", help="check fusedops.memory, whose rows have no table")
    add("--again", action="store_true", help="also check families that the JSON already has")


def run(args: argparse.Namespace) -> int:
    """Checks the families, and writes the tables. Returns the exit status: 1 if one is wrong."""
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("families needs transformers: pip install 'fusedops[hf]'")
    pairs = sweep.wanted(args.family, args.kind)
    judge = judge_memory if args.memory else sweep.judge_patch
    rows = sweep.sweep(pairs, args.json, args.seconds_per_family, args.again, _tell, judge)
    if args.markdown:
        args.markdown.write_text(table.markdown(list(rows.values()), sweep.versions()))
    mine = [row for row in rows.values() if (row["kind"], row["family"]) in set(pairs)]
    print(table.verdicts(mine) if args.memory else table.summary(mine))
    return int(not table.all_right(mine))


def _tell(row: Row, done: int, of: int) -> None:
    print(f"{done:4} of {of}  {table.line(row)}", flush=True)
