"""The command line of the checks, for example `python -m checks machine-code`."""

import argparse
import sys

from checks import builds, compatibility, cuda_build, install_blocks, sanitize, torches, wheel
from checks.families import command as families
from checks.machine_code import command as machine_code
from checks.mutants import command as mutants
from checks.transformers_tests import command as transformers_tests


def main(argv: list[str] | None = None) -> int:
    """Runs a check and returns the exit status: 1 if it finds a fault."""
    parser = argparse.ArgumentParser(prog="python -m checks")
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("machine-code", help="check the machine code of the GPU kernels")
    machine_code.add_arguments(add)
    add.set_defaults(run=machine_code.run)
    add = commands.add_parser("cuda-build", help="build against CUDA torches, without a GPU")
    cuda_build.add_arguments(add)
    add.set_defaults(run=cuda_build.run)
    add = commands.add_parser("families", help="patch a tiny model of every transformers family")
    families.add_arguments(add)
    add.set_defaults(run=families.run)
    add = commands.add_parser("mutants", help="plant one-line bugs that the tests must catch")
    mutants.add_arguments(add)
    add.set_defaults(run=mutants.run)
    add = commands.add_parser("sanitize", help="run the tests under AddressSanitizer and UBSan")
    sanitize.add_arguments(add)
    add.set_defaults(run=sanitize.run)
    add = commands.add_parser("torches", help="compile every source for several torches")
    torches.add_arguments(add)
    add.set_defaults(run=torches.run)
    add = commands.add_parser(
        "transformers-tests", help="run transformers' own tests, plain and patched"
    )
    transformers_tests.add_arguments(add)
    add.set_defaults(run=transformers_tests.run)
    add = commands.add_parser("compatibility", help="write docs/compatibility.md from its JSON")
    compatibility.add_arguments(add)
    add.set_defaults(run=compatibility.run)
    add = commands.add_parser("quick-record", help="run the quick tests, and record the versions")
    compatibility.add_record_arguments(add)
    add.set_defaults(run=compatibility.record)
    add = commands.add_parser("wheel", help="build one wheel for every supported torch, into dist/")
    add.set_defaults(run=wheel.run)
    add = commands.add_parser("wheel-check", help="run the quick tests with the wheel in dist/")
    wheel.add_check_arguments(add)
    add.set_defaults(run=wheel.run_check)
    add = commands.add_parser("install-blocks", help="run the pages' install blocks against dist/")
    install_blocks.add_arguments(add)
    add.set_defaults(run=install_blocks.run)
    add = commands.add_parser("builds", help="compare the launch times of two builds")
    builds.add_arguments(add)
    add.set_defaults(run=builds.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
