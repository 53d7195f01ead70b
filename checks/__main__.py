"""The command line of the checks, for example `python -m checks machine-code`."""

import argparse
import sys
from types import ModuleType

from checks import (
    builds,
    calibration,
    compatibility,
    cuda_build,
    install_blocks,
    sanitize,
    torches,
    wheel,
)
from checks.families import command as families
from checks.machine_code import command as machine_code
from checks.mutants import command as mutants
from checks.transformers_tests import command as transformers_tests

# Each module has `add_arguments` and `run`; its docstring's first line is the command's help.
COMMANDS: dict[str, ModuleType] = {
    "machine-code": machine_code,
    "cuda-build": cuda_build,
    "families": families,
    "mutants": mutants,
    "sanitize": sanitize,
    "torches": torches,
    "transformers-tests": transformers_tests,
    "compatibility": compatibility,
    "install-blocks": install_blocks,
    "builds": builds,
    "calibration": calibration,
}


def main(argv: list[str] | None = None) -> int:
    """Runs a check and returns the exit status: 1 if it finds a fault."""
    parser = argparse.ArgumentParser(prog="python -m checks")
    commands = parser.add_subparsers(required=True)
    for name, module in COMMANDS.items():
        add = commands.add_parser(name, help=str(module.__doc__).split(": `")[0].splitlines()[0])
        module.add_arguments(add)
        add.set_defaults(run=module.run)
    add = commands.add_parser("quick-record", help="run the quick tests, and record the versions")
    compatibility.add_record_arguments(add)
    add.set_defaults(run=compatibility.record)
    add = commands.add_parser("wheel", help="build one wheel for every supported torch, into dist/")
    add.set_defaults(run=wheel.run)
    add = commands.add_parser("wheel-check", help="run the quick tests with the wheel in dist/")
    wheel.add_check_arguments(add)
    add.set_defaults(run=wheel.run_check)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
