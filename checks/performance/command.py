"""Prints predicted kernel speeds, and can write them to a page: `python -m checks performance`."""

import argparse
from pathlib import Path

from checks.machine_code import nvcc
from checks.performance import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", type=Path, metavar="FILE", help="page with the section")


def run(args: argparse.Namespace) -> int:
    if nvcc.find() is None:
        raise SystemExit("performance needs nvcc, on the PATH or under CUDA_HOME")
    section = table.section()
    print(section)
    if args.write:
        args.write.write_text(table.placed(args.write.read_text(), section))
    return 0
