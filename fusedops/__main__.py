"""The command line: `python -m fusedops info`, `demo` and `coverage`."""

import argparse
import sys
from collections.abc import Sequence

import fusedops
from fusedops import coverage, demo


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fusedops", description=fusedops.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and which backend each operator uses")
    training = commands.add_parser("demo", help="train a model eager and fused, side by side")
    add = training.add_argument
    add("--steps", type=int, help="training steps (default 150)")
    add("--threads", type=int, default=1, help="CPU threads (default 1)")
    add("--out", default="demo", help="folder for demo.png and demo.json (default demo)")
    add("--quick", action="store_true", help="a tiny model, 8 steps")
    sweep = commands.add_parser("coverage", help="patch a tiny model of every transformers family")
    add = sweep.add_argument
    add("family", nargs="*", help="families, by their model_type (default all)")
    add("--kind", action="append", choices=coverage.KINDS, help="may be given several times")
    add("--json", help="file for the rows; those that it has are not judged again")
    add("--markdown", help="file for the table")
    add("--seconds-per-family", type=float, default=coverage.SECONDS, help="default %(default)g")
    add("--again", action="store_true", help="judge families that the JSON has anew")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "info":
        print(fusedops.env_report())
    elif args.command == "coverage":
        right = coverage.run(
            args.family,
            args.kind or (),
            args.json,
            args.markdown,
            args.seconds_per_family,
            args.again,
        )
        sys.exit(not right)
    else:
        demo.run(steps=args.steps, threads=args.threads, out=args.out, quick=args.quick)


if __name__ == "__main__":
    main()
