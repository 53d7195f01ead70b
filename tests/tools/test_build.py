"""The C++ build: its errors, its record, and symbols that its object files may not share."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from checks.tree import objects
from fusedops import building, extension
from fusedops.toolchain import Torch, compiler

ROOT = Path(__file__).parents[2]


def python(*args, cwd=ROOT, **environment):
    """Runs a new interpreter; returns its exit status, stdout and stderr."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_the_build_is_recorded_beside_the_extension():
    assert extension.BUILD["torch"] == torch.__version__
    record = Path(extension._C.__file__).with_suffix(".json")
    assert json.loads(record.read_text()) == extension.BUILD


def test_asking_for_cuda_without_it_fails():
    if torch.version.cuda and cpp_extension.CUDA_HOME:
        pytest.skip("CUDA is here")
    asked = {"FUSEDOPS_CUDA": "1", "FUSEDOPS_REQUIRE": "compiled"}
    run = python("setup.py", "build_ext", "--inplace", **asked)
    assert run.returncode == 1
    assert "FUSEDOPS_CUDA=1 needs a torch with CUDA and nvcc" in run.stderr


def test_the_build_brings_no_torch_of_its_own():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [need for need in needs if re.match(r"torch\b", need)]


def leaks(compiled, isa):
    """Symbols that the linker may take from `compiled` for another instruction set's code.

    Of functions that several objects define (nm: W, V, u) it keeps any one. Safe are those with
    the namespace `isa` in their mangled name, where 6AVX512 is an identifier of six letters.
    """
    mangled = re.compile(rf"(?<!\d){len(isa)}{isa}")
    listing = subprocess.check_output(["nm", "--defined-only", compiled], text=True)
    symbols = (line.split()[-2:] for line in listing.splitlines())
    return [name for kind, name in symbols if kind in "WVu" and not mangled.search(name)]


def built():
    """Returns the objects of the tree's own build, which is up to date."""
    work = ROOT / "build" / "temp"
    paths = [Path(path) for path in objects(work)]
    assert len(paths) > 60 and all(path.exists() for path in paths), "make build first"
    return paths


def test_instruction_sets_share_no_symbol():
    kernels = [path for path in built() if path.parent.name == "kernels"]
    assert {isa_of(path) for path in kernels} == {"AVX2", "AVX512", "AVX512_BF16"}
    assert {path: leaked for path in kernels if (leaked := leaks(path, isa_of(path)))} == {}


def isa_of(path):
    return Path(path).stem.rpartition(".")[2]


# What AVX512_BF16 adds to AVX512: conversions and products of bfloat16, products of bytes.
BF16_INSTRUCTION = re.compile(r"\t(?:v(?:dpbf16ps|cvtne2?ps2bf16|pdp\w+)|tdp\w+)")


def bf16_instructions(compiled):
    listing = ["objdump", "--disassemble", "--no-show-raw-insn", compiled]
    return len(BF16_INSTRUCTION.findall(subprocess.check_output(listing, text=True)))


def test_every_third_copy_has_instructions_of_its_own():
    copies = [path for path in built() if isa_of(path) == "AVX512_BF16"]
    assert [path.name for path in copies if not bf16_instructions(path)] == []


@pytest.mark.parametrize("name", building.WITHOUT_BF16)
def test_files_without_a_third_copy_need_none(name, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "WITHOUT_BF16", ())
    ending = f"{name.replace('/', '.')}.cpp.AVX512_BF16.o"
    steps = building.kernels(Torch.installed(), tmp_path)
    (step,) = [step for step in steps if step.made.endswith(ending)]
    command = [*compiler(), *shlex.split(step.flags), "-c", *step.sources, "-o", step.made]
    subprocess.run(command, check=True)
    assert bf16_instructions(step.made) == 0


def test_another_torch_compiles_everything_again(tmp_path):
    steps = {step.made: step for step in building.steps([Torch.installed()], tmp_path)}

    def depends_on_torch(step):
        needed = (steps[name] for name in step.needs if name in steps)
        return any(n.endswith(".version") for n in step.needs) or any(map(depends_on_torch, needed))

    compiled = [step for step in steps.values() if step.rule == "compile"]
    assert [step.made for step in compiled if not depends_on_torch(step)] == []


def test_a_second_build_writes_no_input_again(tmp_path):
    def written():
        assert [*building.steps([Torch.installed()], tmp_path)]
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    assert written() == written()


def mixed_symbols(objects):
    """Symbols that are strong in one object and weak in another: two things of one name.

    The linker keeps the strong one without a word, for both.
    """
    strong, weak = set(), set()
    for compiled in objects:
        listing = subprocess.check_output(["nm", "--defined-only", compiled], text=True)
        for *_, kind, name in (line.split() for line in listing.splitlines() if line):
            if kind in "TDBR":
                strong.add(name)
            elif kind in "WVu":
                weak.add(name)
    return strong & weak


def test_no_symbol_is_strong_here_and_weak_there():
    assert mixed_symbols(built()) == set()


TOKEN = re.compile(
    r"namespace\s*(?P<namespace>[\w:]*)\s*\{"
    r"|\b(?P<extern>extern)\s*\{"
    r"|\b(?:class|struct|union|enum(?:\s+class)?)\s+(?:alignas\([^)]*\)\s*)?"
    r"(?P<type>\w+(?:<[^;{}()]*>)?)\s*(?:final\s*)?(?::[^;{}]*)?\{"
    r"|(?P<brace>[{}])"
)
NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])+\'|^\s*#(?:\\\n|[^\n])*', re.S | re.M
)


def types_in(code):
    """Yields the qualified names of the types that a source defines for other files to see."""
    scopes = []  # of each open brace: a name, "" where it is a block or an unnamed namespace
    for token in TOKEN.finditer(NOT_CODE.sub(" ", code)):
        if token["brace"] == "}":
            scopes.pop()
            continue
        scopes.append(token["namespace"] or token["extern"] or token["type"] or "")
        if token["type"] and all(scopes):
            yield "::".join(scopes)


def test_no_two_files_define_a_type_of_one_name():
    files_by_type = {}
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            for name in types_in(path.read_text()):
                files_by_type.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    assert len(files_by_type) > 50
    assert {name: files for name, files in files_by_type.items() if len(files) > 1} == {}


SHARED = "inline __attribute__((noinline)) float twice(float x) { return 2 * x; }"
USE = "float use(float x) { return twice(x); }"


@pytest.mark.parametrize(
    "code,leaking",
    [
        (f"{SHARED} namespace AVX512 {{ {USE} }}", ["_Z5twicef"]),
        (f"namespace AVX2 {{ {SHARED} {USE} }}", ["_ZN4AVX25twiceEf"]),
        (f"namespace AVX512_BF16 {{ {SHARED} {USE} }}", ["_ZN11AVX512_BF165twiceEf"]),
        (f"namespace AVX512 {{ {SHARED} {USE} }}", []),
    ],
    ids=["none", "lower", "higher", "own"],
)
def test_a_leak_is_seen(tmp_path, code, leaking):
    source, compiled = tmp_path / "leak.cpp", tmp_path / "leak.o"
    source.write_text(code)
    compile_to(compiled, "-O2")
    assert leaks(compiled, "AVX512") == leaking


def compile_to(compiled, *flags):
    """The object of the .cpp file beside it."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *flags, "-c", compiled.with_suffix(".cpp"), "-o", compiled]
    subprocess.run(command, check=True)
