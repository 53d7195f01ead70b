"""The command line of `python -m checks families` (`make coverage`)."""

import argparse

from checks import families


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("family", nargs="*", help="families, by their model_type (default all)")
    add("--kind", action="append", choices=families.KINDS, help="may be repeated")
    add("--json", help="file for the rows; families already in it are skipped")
    add("--markdown", help="file for the table")
    add("--seconds-per-family", type=float, default=families.SECONDS, help="default %(default)g")
    add("--memory", action="store_true", help="check fusedops.memory instead")
    add("--again", action="store_true", help="also check families that the JSON already has")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a family is wrong."""
    all_right = families.run(
        args.family,
        args.kind or (),
        args.json,
        args.markdown,
        args.seconds_per_family,
        args.again,
        args.memory,
    )
    return int(not all_right)
