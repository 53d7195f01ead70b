"""GPU kernels' code, compiled without a GPU, passes checks of spills, loads and tensor cores.

The tests compile all of nvcc's kernels and some of Triton's. They skip kernels that have passed
`make cuda-check` and have not changed since. `make cuda-check` compiles all kernels, also under the
oldest Triton. Toy kernels and invented counts show that each check (gate) can fail.
"""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from shutil import copytree

import pytest

from checks.machine_code import launches, nvcc, passed, sass_loops, table
from checks.machine_code.cuda import DEMANDS
from checks.machine_code.gates import EXCUSES, Compiled, Demand, Excuse, failures, idle
from checks.machine_code.sass import Resources

pytest.importorskip("triton")

TOYS = Path(__file__).parents[1] / "machine_code" / "toys.cu"
PLAIN = Resources(registers=32, shared=0, local=0, spills=0, loads=4, stores=2, tensor_cores=())

NOTHING = Demand()

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="nvcc is not installed")


def kernel(arch="sm_90a", demand=NOTHING, **facts) -> Compiled:
    return Compiled("nvcc 13.0", "f<bf16>", "", "", arch, replace(PLAIN, **facts), demand)


def kernels_of(family):
    """Returns the names of the family's Triton kernels, from their files."""
    place = nvcc.ROOT / "fusedops" / "triton" / family
    files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    kernel = re.compile(r"@triton\.jit.*\ndef (\w+_kernel)\(")
    return {name for file in files for name in kernel.findall(file.read_text())}


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_triton_kernels(family):
    if passed.is_recorded(passed.triton_digest(family, version("triton"))):
        return
    kernels = launches.compiled(family, 90, quick=True)
    assert {kernel.kernel for kernel in kernels} == kernels_of(family.rpartition(".")[2])
    assert not failures(kernels)


@needs_nvcc
def test_cuda_kernels():
    """Checks the kernels that changed; docs/machine_code.md agrees if its nvcc is the same."""
    sources = nvcc.sources(".cu")
    changed = [p for p in sources if not passed.is_recorded(passed.cuda_digest(p))]
    kernels = [k for source in changed for k in nvcc.compiled(source)]
    assert not failures(kernels)
    if changed == sources:
        excuses = [e for e in EXCUSES if any(fnmatchcase(k.name, e.kernel) for k in kernels)]
        assert not idle(kernels, DEMANDS, excuses)
    written = (nvcc.ROOT / "docs" / "machine_code.md").read_text()
    if changed and f"## {nvcc.version()}\n" in written:
        differences = table.differences(kernels, written)
        # The table also has the rows of the sources that did not change.
        whole = changed == sources
        assert not [line for line in differences if whole or "the table lacks" in line]


@needs_nvcc
@pytest.mark.parametrize(
    ("path", "sources", "families"),
    [
        ("csrc/cuda/adamw/step.cu", {"adamw/step.cu"}, set()),
        ("checks/machine_code/cuda/norm.py", {"all"}, set()),
        ("fusedops/triton/quantized_linear/codes.py", set(), {"quantized_linear"}),
        ("fusedops/triton/tile.py", set(), {"all"}),
        ("csrc/ops/quantized_linear/gpu_kernel.cpp", set(), {"quantized_linear"}),
        ("checks/machine_code/gates.py", {"all"}, {"all"}),
    ],
)
def test_a_changed_kernel_or_gate_is_compiled_again(monkeypatch, tmp_path, path, sources, families):
    """Its digest is not the recorded one; a changed comment does not count."""
    for folder in ("csrc", "fusedops/triton", "checks/machine_code"):
        copytree(nvcc.ROOT / folder, tmp_path / folder)
    for module in (passed, nvcc):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(passed, "RECORD", tmp_path / "passed.json")
    cuda = {str(p.relative_to(tmp_path / "csrc" / "cuda")): p for p in nvcc.sources(".cu")}
    triton = {family.rpartition(".")[2]: family for family in launches.FAMILIES}

    def changed():
        digests = {name: passed.cuda_digest(source) for name, source in cuda.items()}
        digests |= {name: passed.triton_digest(dotted, "3.9.0") for name, dotted in triton.items()}
        return {name for name, digest in digests.items() if not passed.is_recorded(digest)}

    cuda_units = [str(source.relative_to(tmp_path)) for source in cuda.values()]
    passed.record({nvcc.version(): cuda_units, "triton 3.9.0": launches.FAMILIES})
    assert not changed()
    file = tmp_path / path
    python, text = file.suffix == ".py", file.read_text()
    file.write_text(("# A comment.\n" if python else "// A comment.\n") + text)
    assert not changed()
    file.write_text(text + ("ADDED = 1\n" if python else "struct Added {};\n"))
    assert changed() == (set(cuda) if "all" in sources else sources) | (
        set(triton) if "all" in families else families
    )
    assert not passed.is_recorded(passed.triton_digest(launches.FAMILIES[0], "3.6.0"))


@needs_nvcc
def test_bridges_from_tensors_parse():
    assert nvcc.parses(nvcc.bridges())


@pytest.fixture(scope="module")
def cuda_toys() -> dict[str, Compiled]:
    return {toy.kernel: toy for toy in nvcc.compiled(TOYS, ["sm_90a"])}


@needs_nvcc
def test_what_is_read_of_cuda_kernels(cuda_toys):
    resources = {name: kernel.resources for name, kernel in cuda_toys.items()}
    vectors = resources.pop("vectors<fp32, Way 1, true>")
    assert (vectors.loads, vectors.stores) == (1, 2)
    assert resources["elements"].loads == resources["elements"].stores == 0
    assert resources["dot"].tensor_cores == ("HMMA",)
    assert resources["dot"].shared == 32 * 4
    assert resources["local_array"].local == 64 * 4
    assert resources["spill"].registers == 32
    assert {name for name, kernel in resources.items() if kernel.local} == {"local_array", "spill"}
    assert {name for name, kernel in resources.items() if kernel.spills} == {"local_array", "spill"}


@needs_nvcc
def test_a_bridge_with_an_error_does_not_parse(tmp_path):
    source = tmp_path / "wrong.cpp"
    source.write_text("#include <c10/cuda/CUDAStream.h>\nint f() { return c10::cuda::nothing; }\n")
    assert not nvcc.parses(source)


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "demand", "wrong"),
    [
        ("spill", NOTHING, "local memory"),
        ("local_array", NOTHING, "256 bytes of local memory"),
        ("elements", Demand(wide=True), "no 16-byte loads"),
        ("dot", Demand(dot=True), "HMMA, none of HGMMA"),
        ("elements", Demand(dot=True), "no tensor core"),
    ],
)
def test_a_gate_turns_red_on_a_cuda_kernel(cuda_toys, name, demand, wrong):
    assert wrong in "\n".join(failures([replace(cuda_toys[name], demand=demand)]))


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_gates_turn_red_on_triton_kernels(arch):
    kernels = launches.compiled("tests.machine_code.toys", arch)
    assert len(kernels) == 7
    wrong = {(toy.kernel, toy.case): "\n".join(failures([toy])) for toy in kernels}
    assert (
        wrong.pop(("copy", "n = 1024")) == wrong.pop(("dot", "")) == wrong.pop(("ahead", "")) == ""
    )
    assert "0 loads under a loop's exponentials, not 1" in wrong.pop(("late", ""))
    assert "0 16-byte loads, not 1" in wrong.pop(("copy", "n = 1000"))
    assert "no tensor core" in wrong.pop(("no_dot", ""))
    assert "local memory" in wrong.pop(("spill", ""))


@pytest.mark.parametrize(
    ("compiled", "wrong"),
    [
        (kernel(), []),
        (kernel(spills=3), ["3 loads and stores of local memory"]),
        (kernel(local=8), ["8 bytes of local memory per thread"]),
        (replace(kernel(registers=255), warps=8), []),
        (replace(kernel(registers=129), warps=16), ["129 registers in 16 warps, of 65536"]),
        (kernel(demand=Demand(loads=4, stores=2, wide=True)), []),
        (kernel(demand=Demand(loads=2)), ["4 16-byte loads, not 2"]),
        (kernel(demand=Demand(stores=4)), ["2 16-byte stores, not 4"]),
        (kernel(demand=Demand(wide=True), stores=0), ["no 16-byte stores"]),
        (kernel("sm_90", Demand(pure=True), tensor_cores=("HGMMA",)), []),
        (
            kernel("sm_90", Demand(dot=True, pure=True), tensor_cores=("HGMMA", "HMMA")),
            ["HGMMA, HMMA, not only HGMMA, IGMMA, QGMMA"],
        ),
        (kernel("sm_90a", Demand(intensity=100), intensity=100.0), []),
        (
            kernel("sm_90a", Demand(intensity=100), intensity=24),
            ["24 FLOP per loaded byte, not 100"],
        ),
        (kernel("sm_80", Demand(intensity=100), intensity=24), []),
        (kernel(demand=Demand(early=4), early=4), []),
        (kernel(demand=Demand(early=4), early=3), ["3 loads under a loop's exponentials, not 4"]),
        (kernel("sm_80", Demand(dot=True), tensor_cores=("HMMA",)), []),
        (kernel("sm_90", Demand(dot=True), tensor_cores=("HGMMA",)), []),
        (
            kernel("sm_100a", Demand(dot=True), tensor_cores=("HMMA",)),
            ["HMMA, none of UTCHMMA, UTCIMMA, UTCQMMA"],
        ),
    ],
)
def test_gates(compiled, wrong):
    assert [line.partition(": ")[2] for line in failures([compiled])] == wrong


def test_an_excuse_is_used_or_fails():
    spilling, excuse = kernel(spills=3), Excuse("f<*", "sm_90*", 3, "a reason")
    assert not failures([spilling], [excuse])
    assert failures([replace(spilling, arch="sm_80")], [excuse])
    assert failures([kernel(spills=4)], [excuse])
    assert failures([kernel(spills=3, demand=Demand(loads=2))], [excuse])
    assert not idle([spilling], [], [excuse])
    assert "excuses nothing" in idle([kernel()], [], [excuse])[0]
    assert idle([kernel()], ["g<*", "f<*"], []) == ["no kernel is called g<*"]


def test_the_table_shows_what_differs():
    rows = [kernel("sm_80", registers=40), kernel("sm_90a"), kernel("sm_90a", registers=36)]
    text = table.document(rows, [Excuse("f<*", "sm_80", 3, "a reason")])
    assert "| `f<bf16>` | 40 / 32-36 | 0 | 0 | 0 | 4 | 2 | no |" in text
    assert "| `f<*` | sm_80 | 3 | a reason |" in text
    assert not table.differences(rows, text)
    changed = [kernel("sm_80", registers=41), *rows[1:]]
    assert len(table.differences(changed, text)) == 2

    newer = [replace(row, compiler="nvcc 13.1") for row in changed]
    assert table.differences(newer, text) == ["the table has none of nvcc 13.1"]
    assert not table.differences(newer, table.document([*rows, *newer]))


CODE = """
 /*0000*/                   DEPBAR.LE SB0, 0x0 ;
 /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
 /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4].tnspB, R24 ;
 /*0030*/                   MUFU.EX2 R4, R5 ;
 /*0040*/              @!P0 BRA 0x0070 ;
 /*0050*/                   CALL.REL.NOINC 0x1000 ;
 /*0060*/                   BRA 0x0070 ;
 /*0070*/                   LDGSTS.E.BYPASS.128 [R9+0x8000], desc[UR32][R20.64], !P1 ;
 /*0080*/              @P1 BRA 0x0000 ;
"""


@pytest.mark.parametrize(
    ("change", "flop", "loaded"),
    [
        (("", ""), 2 * 64 * 64 * 16, 4 * 32 * 16),
        (("HGMMA.64x64x16.F32.BF16", "HMMA.16816.F32.BF16"), 4 * 2 * 16 * 8 * 16, 4 * 32 * 16),
        (("MUFU.EX2 R4", "LDG.E.128 R4"), 2 * 64 * 64 * 16, 2 * 4 * 32 * 16),
        (("LDGSTS.E.BYPASS.128", "LDGSTS.E"), 0, 1),
    ],
)
def test_a_loop_is_counted_without_its_slow_path(change, flop, loaded):
    (loop,) = sass_loops.loops(sass_loops.parsed(CODE.replace(*change)), least=5)
    run = list(sass_loops.executed(loop))
    assert len(run) == 7 and sass_loops.intensity(run) == flop / loaded
