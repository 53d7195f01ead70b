"""A new operator family that follows CONTRIBUTING.md's checklist builds and passes its tests.

The family is `scaled_copy`, y = scale * x, whose files are in toy_family/files. They are added to a
copy of the tree. The copy gets the shared edits below, is built with the objects of this tree, and
runs its tests in processes of its own.
"""

import filecmp
import os
import re
import shutil
from pathlib import Path

import pytest
from children import forked

from fusedops.extension import BUILD, UNCOMPILED
from tools import test_layout as layout

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).parent / "toy_family" / "files"
FAMILY = "scaled_copy"
FOLDERS = (".ci", "benchmarks", "checks", "csrc", "docs", "fusedops", "tests")

# The edits of shared files: after this line comes that one.
EDITS = {
    "fusedops/backends.py": {
        '    "adamw": ("adamw_step", "adamw_squares", "adamw_scale"),\n': (
            '    "scaled_copy": ("scaled_copy",),\n'
        ),
        '    "adamw": FAMILIES["adamw"],\n': '    "scaled_copy": ("scaled_copy_forward",),\n',
    },
    "fusedops/functional/__init__.py": {
        "from fusedops.functional.rotary import rotary_embedding\n": (
            "from fusedops.functional.scaled_copy import scaled_copy\n"
        ),
        '    "rotary_embedding",\n': '    "scaled_copy",\n',
    },
    "fusedops/nn/__init__.py": {
        "from fusedops.nn.quantized_linear import QuantizedLinear\n": (
            "from fusedops.nn.scaled_copy import ScaledCopy\n"
        ),
        '    "RMSNorm",\n': '    "ScaledCopy",\n',
    },
    "docs/reference/support.md": {
        "| rotary | `rotary_embedding` | |\n": "| scaled_copy | `scaled_copy` | `ScaledCopy` |\n",
    },
}

# What the checklist has for families of other kinds: CUDA kernels, matrix products.
OTHERS = {
    "csrc/cuda/X/",
    "csrc/kernels/X.h",
    "checks/machine_code/cuda/X.py",
}

UNCOMPILED_CALL = """
import torch, fusedops
from fusedops.testing import check
from fusedops.functional import scaled_copy
from fusedops.references.scaled_copy import scaled_copy_reference
assert fusedops.extension.UNCOMPILED
x = torch.randn(7, 130)
check(scaled_copy, scaled_copy_reference, (x, 0.3), "reference")
assert torch.equal(scaled_copy(x, 2.0), 2 * x)
print(fusedops.env_report())
"""


def new_files():
    return {str(p.relative_to(FILES)) for p in FILES.rglob("*") if is_source(p)}


def is_source(path):
    return path.is_file() and not {"__pycache__", ".hypothesis"} & {*path.parts}


def copy_into(folder):
    """The tree, with the family's files and the shared edits."""
    built = shutil.ignore_patterns("_C*", "_build_info.json", "__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith(".git"):
            shutil.copy2(path, folder)
    shutil.copytree(FILES, folder, ignore=built, dirs_exist_ok=True)
    for name, lines in EDITS.items():
        text = (folder / name).read_text()
        for line, following in lines.items():
            assert text.count(line) == 1, f"{name}: {line}"
            text = text.replace(line, line + following)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_into(tmp_path_factory.mktemp("tree"))


def run(folder, words, **environment):
    unset = ("FUSEDOPS_BACKEND", "FUSEDOPS_CPU_ISA")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    path = os.pathsep.join([str(folder), str(folder / "tests")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    return forked(*words, cwd=folder, env=kept | variables | environment).printed(timeout=600)


@pytest.fixture(scope="module")
def built(tree):
    """The tree, and the units that were compiled for it."""
    if UNCOMPILED or not (ROOT / "build" / "temp" / "build.ninja").exists():
        pytest.skip("needs the objects that `make build` leaves in build/temp")
    simt = {"FUSEDOPS_SIMT": "1"} if BUILD.get("simt") else {}
    words = ["-m", "children.toy_build", ROOT]
    return tree, run(tree, words, FUSEDOPS_COMPILED="0", **BUILD.get("flags", {}), **simt)


def test_four_shared_files_change(tree):
    there = [path for path in tree.rglob("*") if is_source(path) and "build" not in path.parts]
    names = {str(path.relative_to(tree)) for path in there if not path.name.startswith("_C")}
    added = {name for name in names if not (ROOT / name).exists()}
    changed = {n for n in names - added if not filecmp.cmp(ROOT / n, tree / n, shallow=False)}
    assert added == new_files()
    assert changed == EDITS.keys() and len(changed) == 4


# CONTRIBUTING's checklist.


def section():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return text.partition("## A new family\n")[2].partition("\n## ")[0]


def listed():
    """The paths in the checklist, X for the family's name."""
    words = re.findall(r"`([^`\s]+)`", section())
    return {word for word in words if "/" in word or word.endswith(".md")}


def names(entry, path):
    """Whether an entry is the path, its folder, or the path without what follows the family."""
    return path == entry or path.startswith((entry.rstrip("/") + "/", entry.rstrip("/") + "."))


def test_the_checklist_names_every_file():
    paths = {path.replace(FAMILY, "X") for path in new_files()} | EDITS.keys()
    assert not {path for path in paths if not any(names(entry, path) for entry in listed())}
    tests = {Path(path).name for path in paths if path.startswith("tests/X/")} - {"__init__.py"}
    assert not {name for name in tests if f"`{name}`" not in section()}


def test_the_checklist_names_nothing_that_the_family_lacks():
    paths = {path.replace(FAMILY, "X") for path in new_files()}
    entries = {entry for entry in listed() if "X" in entry} - OTHERS
    assert not {entry for entry in entries if not any(names(entry, path) for path in paths)}


@pytest.mark.parametrize(
    "path",
    [
        "csrc/ops/scaled_copy",
        "csrc/python/scaled_copy.cpp",
        "csrc/cpu/scaled_copy.cpp",
        "csrc/cpu/isa/scaled_copy.cpp",
        "fusedops/references/scaled_copy.py",
        "fusedops/functional/scaled_copy.py",
        "fusedops/triton/scaled_copy.py",
        "benchmarks/operators/scaled_copy.py",
        "tests/scaled_copy/contract.py",
        "tests/scaled_copy/growth.py",
        "tests/scaled_copy/fuzz.py",
        "checks/machine_code/scaled_copy.py",
    ],
)
def test_what_is_left_out_is_named(tree, path, tmp_path, monkeypatch):
    """By the layout test, of a copy without it."""
    monkeypatch.setattr(layout, "ROOT", tree)
    checks = layout.test_a_family_is_on_its_floors, layout.test_a_family_has_its_tests_and_checks
    for check in checks:
        check(FAMILY)
    kept = shutil.move(tree / path, tmp_path / "kept")
    try:
        with pytest.raises(AssertionError) as error:
            for check in checks:
                check(FAMILY)
    finally:
        shutil.move(kept, tree / path)
    assert path in str(error.value) or str(Path(path).parent) in str(error.value)


# The family at work.


def test_only_its_own_units_are_compiled(built):
    _, units = built
    isa = {f"csrc.cpu.isa.{FAMILY}.cpp.{name}.o" for name in ("AVX2", "AVX512", "AVX512_BF16")}
    compiled = {name for name in units.split() if name.endswith(".o")}
    assert isa <= compiled and len(compiled - isa) == 4, compiled


# Tests that read the list of families, and which of them concern this one.
OF_EVERY_FAMILY = {
    "tests/tools/test_machine_code.py": FAMILY,
    "tests/tools/test_mutants.py": FAMILY,
    "tests/package/test_backends.py": "report_names_every",
    "tests/package/test_quick.py": FAMILY,
    "tests/contract/test_autograd.py": FAMILY,
    "tests/contract/test_bytes.py": "operator_has_a_formula",
    "tests/contract/test_compilers.py": FAMILY,
    "tests/contract/test_errors.py": FAMILY,
    "tests/contract/test_compiled_autograd.py": FAMILY,
    "tests/contract/test_fuzz.py": FAMILY,
    "tests/contract/test_flops.py": "product_has_a_formula",
    "tests/contract/test_nested.py": FAMILY,
    "tests/growth/test_growth.py": f"{FAMILY} or ScaledCopy or every_public_name",
}


def test_its_tests_and_those_of_every_family_pass(built):
    tree, _ = built
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{FAMILY}"]
    chosen = " or ".join(dict.fromkeys(OF_EVERY_FAMILY.values()))
    done = run(tree, [*words, *OF_EVERY_FAMILY, "-k", chosen, "-rA"])
    passed = {line.partition("::")[0] for line in done.splitlines() if line.startswith("PASSED ")}
    assert {f"PASSED {file}" for file in OF_EVERY_FAMILY} <= passed


def test_it_runs_without_a_compiled_part(tree):
    words = ["-c", UNCOMPILED_CALL]
    report = run(tree, words, FUSEDOPS_COMPILED="0")
    assert re.search(rf"^{FAMILY} +composite ", report, re.M)


def test_its_benchmark_runs(built):
    """One row, from the family's table, against the reference."""
    tree, _ = built
    words = [FAMILY, "--quick", "--seconds", "0.01", "--allocator", "default"]
    out = run(tree, ["-m", "benchmarks", *words, "--match", "forward float32 [1, 4096]"])
    assert "fusedops" in out and "eager" in out, out
