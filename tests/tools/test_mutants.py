"""Each mutant of `make mutants` replaces a text that occurs exactly once in its source file."""

from collections import Counter

import pytest

from checks.mutants.command import drawn
from checks.mutants.mutant import mutants
from checks.tree import ROOT, used_here

COUNT = Counter(mutant.file for mutant in mutants())
COMPUTES = ["csrc/cpu/**/*.cpp", "csrc/cuda/*/*.c*", "csrc/cuda/device.cuh"]
COMPUTES += ["fusedops/triton/**/*.py"]
KERNEL_FILES = {str(p.relative_to(ROOT)) for glob in COMPUTES for p in ROOT.glob(glob)}


@pytest.mark.parametrize("file", COUNT)
def test_each_mutant_has_one_place(file):
    text = (ROOT / file).read_text()
    counts = {mutant.why: text.count(mutant.find) for mutant in mutants(file)}
    assert counts == dict.fromkeys(counts, 1)


def test_every_kernel_file_has_its_mutants():
    few = {file for file in KERNEL_FILES if COUNT[file] < 10}
    assert not {file for file in few if not file.endswith(("/isa.cpp", "/__init__.py"))}


def test_no_mutant_is_what_stands_there():
    assert not [mutant for mutant in mutants() if mutant.find == mutant.replace]


def test_a_sample_keeps_the_order_of_the_lists():
    listed = [*mutants("csrc/cpu/norm")]
    some = drawn(listed, 5, seed=3)
    assert len(some) == 5 and some == sorted(some, key=listed.index) == drawn(listed, 5, seed=3)
    assert some != drawn(listed, 5, seed=4)
    assert drawn(listed, 10**6, seed=3) == listed


@pytest.mark.parametrize("isa", ["AVX2", "AVX512", "AVX512_BF16"])
def test_a_mutant_is_compiled_for_the_code_that_runs(isa):
    """A file without bfloat16 instructions runs its AVX512 code on a CPU that has them."""
    both = [f"a.cpp.{name}.o" for name in ("AVX2", "AVX512", "AVX512_BF16")]
    plain, rest = ["b.cpp.AVX2.o", "b.cpp.AVX512.o"], ["c.cpp.o", "d.cu.o"]
    used = used_here([*both, *plain, *rest], isa)
    assert used == [f"a.cpp.{isa}.o", f"b.cpp.{'AVX2' if isa == 'AVX2' else 'AVX512'}.o", *rest]
