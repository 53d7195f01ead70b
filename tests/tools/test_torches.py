"""`make torch-check` compiles every C++ source against other torch versions, and reports errors."""

import re
from pathlib import Path

import pytest
import torch

from checks import compatibility
from checks.machine_code import nvcc
from checks.packages import VERSIONS, package
from checks.torches import PACKAGES, Unit, units
from checks.tree import ROOT

INSTALLED = Path(torch.__file__).parent


def test_every_source_is_a_unit():
    """csrc/cpu/isa's files, once per instruction set, except those that bf16 leaves unchanged."""
    names = [unit.name for unit in units(INSTALLED)[1]]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp")}
    if nvcc.find() is None:
        sources = {source for source in sources if not source.startswith("csrc/cuda/")}
    assert sources <= {name.partition(" ")[0] for name in names}
    assert {
        f"csrc/cpu/isa/norm/forward.cpp {isa}" for isa in ("AVX2", "AVX512", "AVX512_BF16")
    } <= {*names}
    assert len(names) == len({*names})


def test_no_other_torch_is_on_the_path(tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    headers, sources = units(tmp_path)
    for unit in [*headers, *sources]:
        assert not [word for word in unit.command if str(INSTALLED) in word]
        assert [word for word in unit.command if str(tmp_path / "include") in word]


def test_the_first_error_is_reported(tmp_path):
    source = tmp_path / "wrong.cpp"
    source.write_text("int f() { return g(); }\nint h() { return i(); }\n")
    error = Unit("wrong", ["g++", "-fsyntax-only", str(source)]).error()
    assert re.fullmatch("error: .g. was not declared in this scope", error)
    source.write_text("int f() { return 1; }\n")
    assert Unit("right", ["g++", "-fsyntax-only", str(source)]).error() == ""


def test_an_ambiguous_sum_fails_on_torch_2_11(tmp_path):
    """Code that once failed to compile there: a list may be sizes or names."""
    if not (PACKAGES / "2.11.0" / "unpacked").exists():
        pytest.skip("make torch-check downloads the headers")
    units_of_it = units(package("2.11.0", PACKAGES))[1]
    unit = next(unit for unit in units_of_it if unit.name.endswith("backward.cpp"))
    source = tmp_path / "sum.cpp"
    source.write_text("#include <ATen/ATen.h>\nauto f(at::Tensor t) { return t.sum({0, 2}); }\n")
    words = [str(source) if word.endswith(".cpp") else word for word in unit.command]
    assert "ambiguous" in Unit("sum", words).error()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_result_of_each_torch_is_recorded(version):
    entry = compatibility.load()["compiled"][version]
    assert entry["units"] > 100 and entry["compilers"] and entry["failed"] == {}
