"""`python -m checks sanitize`: the C++ under AddressSanitizer and UBSan, over tests and fuzz."""

import argparse
import subprocess
import sys
from collections.abc import Iterator

from checks.mutants.mutant import Mutant
from checks.tree import ROOT, Tree

# Those that call kernels, which is where bounds are. Compiled graphs are C++ of another's making.
# Without -s the report of the process that it ends would be lost with what pytest has captured.
NAMES = ("test_norm.py", "test_norm_torch.py", "test_norm_modules.py")
NAMES += ("test_gated_activation.py", "test_gated_activation_torch.py")
NAMES += ("test_linear.py", "test_linear_torch.py", "test_rotary.py", "test_rotary_torch.py")
NAMES += ("test_cross_entropy.py", "test_cross_entropy_linear.py", "test_cross_entropy_torch.py")
NAMES += ("test_attention.py", "test_attention_torch.py")
NAMES += ("test_adamw.py", "test_adamw_torch.py", "test_adamw_mixed_precision.py", "test_fuzz*.py")
FILES = sorted(path for name in NAMES for path in ROOT.glob(f"tests/{name}"))
TESTS = f"-s -W ignore {' '.join(str(path.relative_to(ROOT)) for path in FILES)} -k '{{}}'"
KERNELS = "not (triton or interpreted or compile or opcheck or export)"

# What the sanitizers must see, or they see nothing.
PLANTED = (
    Mutant(
        "csrc/cpu/vec.h",
        TESTS.format("cpu and test_forward_and_gradients and 33"),
        "reads past the row's end",
        "at::vec::Vectorized<T>::loadu(p, tail.count)",
        "at::vec::Vectorized<T>::loadu(p)",
    ),
    Mutant(
        "csrc/cuda/norm/row.cuh",
        TESTS.format("simt and test_roundings"),
        "a vector more than the row has",
        "if (col < n) body(i, col);",
        "if (col <= n) body(i, col);",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=KERNELS, help="another selection, as pytest's -k")
    parser.add_argument("--planted", action="store_true", help="see that planted bugs are seen")


def run(args: argparse.Namespace) -> int:
    """The exit status: 1 when a test fails or a sanitizer ends it, or does not see what it must."""
    tree = sanitized()
    tree.sync()
    tree.build()
    if args.planted:
        unseen = list(overlooked(tree))
        print(*unseen or ["every planted bug was seen"], sep="\n")
        return int(bool(unseen))
    found = tree.pytest(TESTS.format(args.only))
    sys.stdout.write(found.stdout)
    return int(found.returncode != 0)


def sanitized() -> Tree:
    """The copy that is built with the sanitizers: their first error ends the process."""
    # Python never frees all that it has, and torch's libraries share symbols
    options = "detect_leaks=0:detect_odr_violation=0"
    return Tree(
        ROOT / "build" / "asan" / "tree",
        [library("libasan.so"), library("libubsan.so")],
        FUSEDOPS_SANITIZE="address,undefined",
        ASAN_OPTIONS=options,
    )


def library(name: str) -> str:
    """Where the compiler has it."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def overlooked(tree: Tree) -> Iterator[str]:
    """The planted bugs that no sanitizer reports."""
    for mutant in PLANTED:
        path = tree.folder / mutant.file
        right = path.read_text()
        assert right.count(mutant.find) == 1, mutant
        path.write_text(right.replace(mutant.find, mutant.replace))
        try:
            tree.rebuild()
            if "ERROR: AddressSanitizer" not in tree.pytest(mutant.tests).stdout:
                yield f"{mutant.file}: {mutant.why}: not seen"
        finally:
            path.write_text(right)
