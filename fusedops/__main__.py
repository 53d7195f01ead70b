"""The command line: `python -m fusedops info` and `python -m fusedops demo`."""

import argparse
from collections.abc import Sequence

import fusedops
from fusedops import demo


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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "info":
        print(fusedops.env_report())
    else:
        demo.run(steps=args.steps, threads=args.threads, out=args.out, quick=args.quick)


if __name__ == "__main__":
    main()
