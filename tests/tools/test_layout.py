"""Rules for the source tree: operator families' files, imports, file lengths and first lines."""

import ast
import collections
import functools
import graphlib
import importlib
import re
import socket
from pathlib import Path
from types import ModuleType

import pytest

import fusedops
from fusedops.backends import FAMILIES

ROOT = Path(__file__).parents[2]

# Floor: a family's file there, if it is not the folder of the family's name.
FLOORS = {
    "csrc/ops": (),  # the Makefile lists the folders
    "csrc/python": ("{}.cpp",),
    "csrc/cpu": ("{}.cpp",),
    "csrc/cpu/isa": ("{}.cpp",),
    "csrc/cuda": ("{}.cpp",),
    "fusedops/triton": ("{}.py",),
    "fusedops/references": ("{}.py",),
    "fusedops/functional": ("{}.py",),
    "fusedops/costs": ("{}.py",),
    "fusedops/nn": ("{}.py",),
    "fusedops/optim": ("{}.py",),
    "tests": (),
    "benchmarks/operators": ("{}.py",),
}

# What a family's folder in tests/ has.
TESTS = ("cases.py", "growth.py", "test_kernels.py", "test_torch.py")

# Floors that not every family is on. Each has kernels for GPUs on one of the first two.
ON_GPUS = {"csrc/cuda", "fusedops/triton"}
ATEN_ON_GPUS = {"experts"}
OPTIONAL = ON_GPUS | {"fusedops/nn", "fusedops/optim"}

# Each floor's files that belong to no family.
SHARED = {
    "csrc/ops": {
        "autograd.h",
        "calibration.cpp",
        "calibration.h",
        "checks.h",
        "cpu_features.cpp",
        "cpu_features.h",
        "nested.cpp",
        "node.h",
        "operator.h",
        "quantize_rows.cpp",
        "quantize_rows.h",
        "reference.h",
        "seed.h",
    },
    "csrc/python": {
        "errors.cpp",
        "errors.h",
        "exports.h",
        "python.cpp",
        "timed_calls.cpp",
    },
    "csrc/cpu": {
        "activation.h",
        "gemm.cpp",
        "gemm.h",
        "grain.h",
        "isa",
        "isa.cpp",
        "isa.h",
        "row_codes.h",
    },
    "csrc/cpu/isa": {
        "amx.h",
        "dropout.h",
        "exp.h",
        "gates.h",
        "lanes.h",
        "operands.cpp",
        "operands.h",
        "tile_product.cpp",
        "tile_product.h",
        "vec.h",
        "with_type.h",
    },
    "csrc/cuda": {"codes.cuh", "device.cuh", "launch.cuh", "stream.h"},
    "fusedops/triton": {"__init__.py", "tile.py"},
    "fusedops/references": {"__init__.py", "quantized_rows.py"},
    "fusedops/functional": {
        "__init__.py",
        "jagged.py",
        "merge_attention.py",
        "quantized_rows.py",
        "sharded.py",
    },
    "fusedops/costs": {"__init__.py", "traffic.py"},
    "fusedops/nn": {"__init__.py"},
    "fusedops/optim": {"__init__.py"},
    "tests": {
        "axes.py",
        "calling.py",
        "children",
        "conftest.py",
        "contract",
        "docs",
        "examples",
        "growth",
        "integrations",
        "machine_code",
        "package",
        "patching",
        "profiling",
        "quick_interpreter.py",
        "simt",
        "sweeping",
        "tools",
        "tuning",
    },
    "benchmarks/operators": {"__init__.py"},
}

# From the bottom up. A module imports from its own line's name and from the lines above it.
PYTHON = [
    {"fusedops._C", "fusedops.exporting", "fusedops.machine", "fusedops.notice"},
    {"fusedops.references"},
    {"fusedops.toolchain"},
    {"fusedops.cache"},
    {"fusedops.measured"},
    {"fusedops.building"},
    {"fusedops.uncompiled"},
    {"fusedops.extension", "fusedops.allocator", "fusedops.huge_pages"},
    {"fusedops.triton"},
    {"fusedops.backends"},
    {"fusedops.calibration.table", "fusedops.testing"},
    {"fusedops.calibration.choice", "fusedops.measuring"},
    {"fusedops.costs"},
    {"fusedops.functional"},
    {"fusedops.calibration", "fusedops.nn", "fusedops.optim"},
    {"fusedops.patching.core", "fusedops.patching.report"},
    {"fusedops.measuring.memory", "fusedops.patching.modules", "fusedops.patching.yardstick"},
    {"fusedops.patching.lines", "fusedops.patching.models"},
    {"fusedops.patching.quantize"},
    {"fusedops.patching.counts"},
    {"fusedops.patching.patch"},
    {"fusedops.patching", "fusedops.patching.verify"},
    {"fusedops.graphs", "fusedops.measuring.changes"},
    {"fusedops.profiling"},
    {"fusedops.integrations"},
    {"fusedops.sweeping"},
    {"fusedops.tuning"},
    {"fusedops"},
    {"checks.families", "fusedops.demo", "fusedops.doctor"},
    {"fusedops.__main__"},
    {"benchmarks"},
    {"checks"},
    {"examples"},
    {"tests"},
]

# Who may include what of csrc/, the longest prefix decides. Operators reach kernels through the
# dispatcher alone; a kernel includes its operator's header, where allocation is declared.
INCLUDES = {
    "csrc/": [],
    "csrc/common.h": ["csrc/kernels/dtype.h"],
    "csrc/kernels/": ["csrc/kernels/"],
    "csrc/python/": ["csrc/python/", "csrc/ops/"],
    "csrc/python/python.cpp": ["csrc/python/", "csrc/ops/", "csrc/cpu/isa.h"],
    "csrc/python/quantized_linear.cpp": [
        "csrc/python/",
        "csrc/ops/",
        "csrc/cpu/quantized_linear/plan.h",
    ],
    "csrc/ops/": ["csrc/ops/", "csrc/common.h", "csrc/kernels/"],
    "csrc/cpu/": ["csrc/cpu/", "csrc/ops/", "csrc/common.h"],
    "csrc/cpu/isa.": ["csrc/cpu/isa.h", "csrc/kernels/dtype.h"],
    "csrc/cpu/isa/": ["csrc/cpu/isa/", "csrc/cpu/isa.h", "csrc/kernels/"],
    "csrc/cuda/": ["csrc/cuda/", "csrc/ops/", "csrc/kernels/"],
    "csrc/cuda/device.cuh": ["csrc/cuda/launch.cuh", "csrc/simt/simt.h", "csrc/kernels/dtype.h"],
    "csrc/cuda/launch.cuh": [],
    "csrc/cuda/stream.h": [],
    "csrc/simt/": ["csrc/simt/"],
    "tests/": ["csrc/cuda/device.cuh", "csrc/simt/simt.h", "tests/"],
    "tests/tools/toy_family/": ["csrc/"],  # its copy in a tree is checked as a family's
}

# What nvcc and the emulator compile: two seconds a file with these two headers, seven with ATen.
KERNEL_HEADERS = {"c10/util/BFloat16.h", "c10/util/Half.h"}

# Compiled once for each instruction set: an inline function of torch would leak from there.
# So would one of a header that the kernels of every device include.
PER_ISA = ("csrc/cpu/isa/", "csrc/cpu/isa.h", "csrc/kernels/")

# Pairs of files in patching/ where one imports from the other, and of its folders and files. A
# reader of one has to know the other.
MOST_IMPORTS = {"files": 208, "rooms": 30}

MOST_WORDS = 16  # in the first line of a Python file

LONGEST = {"tests": 600}  # a table of cases is no harder to read when it is longer
LONGEST_ELSEWHERE = 450
LONGEST_EXAMPLE = 79

CPP = (".cpp", ".h", ".cu", ".cuh")

# Names that say nothing about what a local holds, and how many of them each folder has at most.
# Lower a number when you rename some; a folder that is not listed has none.
EMPTY_NAME = r"(?:found|one|own|known|wanted|made|of_\w+)"
EMPTY_NAMES = {
    "benchmarks": 4,
    "fusedops": 1,
    "fusedops/profiling": 2,
    "fusedops/references": 3,
    "fusedops/triton": 25,
    "fusedops/tuning": 1,
    "tests": 17,
}


def files(*suffixes):
    folders = ("benchmarks", "checks", "csrc", "docs", "examples", "fusedops", "tests", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found += [path for path in ROOT.iterdir() if not path.name.startswith(".git")]
    return sorted(
        str(path.relative_to(ROOT))
        for path in found
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    )


def text(path):
    return (ROOT / path).read_text()


def is_on(family, floor):
    files = (name.format(family) for name in FLOORS[floor])
    return any((ROOT / floor / name).exists() for name in (family, *files))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_on_its_floors(family):
    lacks = {floor for floor in FLOORS if not is_on(family, floor)}
    assert not lacks - OPTIONAL, f"{family} has no file there"
    without = family in ATEN_ON_GPUS
    assert (lacks >= ON_GPUS) == without, f"kernels of {family} for GPUs, in {ON_GPUS}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_tests_and_checks(family):
    wanted = [f"tests/{family}/{name}" for name in TESTS]
    if is_on(family, "csrc/python") and family != "adamw":  # its operators have no gradients
        wanted.append(f"tests/{family}/contract.py")
    if family not in ("adamw", "experts"):  # whose tests/X/test_fuzz.py draw calls of their own
        wanted.append(f"tests/{family}/fuzz.py")
    if is_on(family, "fusedops/triton"):
        wanted.append(f"checks/machine_code/{family}.py")
    assert not [path for path in wanted if not (ROOT / path).exists()]


def test_nothing_unknown_lies_on_a_floor():
    unknown = {}
    for floor in FLOORS:
        there = {path for path in (ROOT / floor).glob("*") if path.name != "__pycache__"}
        strangers = {path.name for path in there if path.stem not in FAMILIES}
        unknown[floor] = strangers - SHARED.get(floor, set())
    assert not {floor: names for floor, names in unknown.items() if names}


def unit(module):
    """Returns the entry of PYTHON that a module belongs to: itself or a package that it lies in."""
    while module and not any(module in line for line in PYTHON):
        module = module.rpartition(".")[0]
    return module


def rank(module):
    return next(i for i, line in enumerate(PYTHON) if module in line)


@functools.cache
def imported(path):
    """The modules that a file imports, with the line; `from a import b` may mean module a.b."""
    modules = []
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            modules += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return modules


def test_python_imports_point_down():
    paths = [path for path in files(".py") if "/" in path]
    assert not [wrong for path in paths for wrong in imports_that_point_up(path)]


def imports_that_point_up(path):
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    importer = unit(module)
    if not importer:
        yield f"{module} has no place in PYTHON"
        return
    for name, line in imported(path):
        theirs = unit(name)
        if theirs and theirs != importer and rank(theirs) >= rank(importer):
            yield f"{path}:{line} imports {name}"


def import_pairs(home):
    """The pairs (file, imported file) inside a folder, imports for type checkers included."""
    paths = [path for path in files(".py") if path.startswith(home)]
    modules = {p.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in paths}
    for path in paths:
        for name, _ in imported(path):
            theirs = modules.get(name) or modules.get(name.rpartition(".")[0])
            if theirs not in (None, path):
                yield path, theirs


def test_no_files_import_each_other_in_a_circle():
    """A package's `__init__.py` may import its files, which import others of the package."""
    graph = collections.defaultdict(set)
    for path, theirs in import_pairs(""):
        if not f"{path} {theirs}".count("__init__.py"):
            graph[path].add(theirs)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the files


def test_imports_inside_patching_stay_few():
    home = "fusedops/patching/"
    pairs = {*import_pairs(home)}
    rooms = {tuple(p.removeprefix(home).partition("/")[0] for p in pair) for pair in pairs}
    found = {"files": len(pairs), "rooms": sum(one != other for one, other in rooms)}
    assert 0 < found["rooms"] <= MOST_IMPORTS["rooms"]
    assert found["rooms"] < found["files"] <= MOST_IMPORTS["files"]


def test_includes_point_down():
    wrong = {}
    for path in files(*CPP):
        allowed = tuple(INCLUDES[max((p for p in INCLUDES if path.startswith(p)), key=len)])
        headers = re.findall(r'#include "(.*)"', text(path))
        if not all(header.startswith(allowed) for header in headers):
            wrong[path] = f"may include {allowed} only"
    assert not wrong


def test_no_two_files_of_cpp_share_a_name_but_those_of_a_family():
    """A family's folder identifies its files; elsewhere the file's name must be unique."""
    named = collections.defaultdict(list)
    for path in map(Path, files(*CPP)):
        if path.parts[0] == "csrc" and not {*path.parts, path.stem} & {*FAMILIES}:
            named[path.name].append(str(path))
    assert not {name: paths for name, paths in named.items() if len(paths) > 1}


def test_the_cpp_of_a_family_is_in_its_namespace():
    """For example, fusedops::norm has norm's operators, fusedops::cpu::norm its kernels."""
    outside, families = {}, set()
    for path in map(Path, files(*CPP)):
        family = next((name for name in (*path.parts, path.stem) if name in FAMILIES), None)
        if path.parts[0] != "csrc" or not family:
            continue
        families.add(family)
        floor = path.parts[1] if path.parts[1] in ("cpu", "cuda") else ""
        own = rf"fusedops::{floor and floor + '::'}{family}(::CPU_CAPABILITY)?"
        named = re.findall(r"^namespace (fusedops\S*) \{", text(path), re.M)
        if not named or not all(re.fullmatch(own, name) for name in named):
            outside[str(path)] = named
    assert (outside, families) == ({}, {*FAMILIES})


def test_torch_is_included_where_it_does_no_harm():
    wrong = {}
    for path in files(*CPP):
        headers = set(re.findall(r"#include <((?:torch|ATen|c10)/.*)>", text(path)))
        harmful = headers & {"torch/extension.h"}  # 18 s to compile
        if path == "csrc/python/python.cpp":
            harmful = set()
        if path.startswith(PER_ISA):
            harmful |= {name for name in headers if not name.startswith("ATen/cpu/vec/")}
        if path.endswith((".cu", ".cuh")):
            harmful |= headers - KERNEL_HEADERS
        if harmful:
            wrong[path] = harmful
    assert not wrong


def test_an_example_is_whole():
    """A user copies the file alone, and writes what it has: the public names of fusedops."""
    internal = {"benchmarks", "checks", "examples", "tests"}
    wrong = {}
    for path in [path for path in files(".py") if path.startswith("examples/")]:
        names = [name for name, _ in imported(path)]
        private = [name for name in names if "._" in name or name.split(".")[0] in internal]
        length = len(text(path).splitlines())
        if private or length > LONGEST_EXAMPLE:
            wrong[path] = private, length
    assert not wrong


def test_no_file_outgrows_its_reader():
    lengths = {path: len(text(path).splitlines()) for path in files(".py", *CPP)}
    limits = {path: LONGEST.get(Path(path).parts[0], LONGEST_ELSEWHERE) for path in lengths}
    assert not {path: length for path, length in lengths.items() if length > limits[path]}


def test_each_file_says_first_what_it_is():
    """In a docstring or comment, whose subject is a noun and not "What ..."."""
    wrong = {}
    for path in filter(text, files(".py", *CPP)):
        if path.endswith(".py"):
            line = (ast.get_docstring(ast.parse(text(path))) or "").partition("\n")[0]
            fits = len(line.split()) <= MOST_WORDS
        else:
            line = text(path).partition("\n")[0].removeprefix("// ")
            fits = text(path).startswith("// ")  # the sentence may go on in the next line
        if not fits or not re.match(r"(?!What |Whether |Who |Those )\S+ \S+", line):
            wrong[path] = line
    assert not wrong


def given_names(path):
    """The names that a file gives to variables, parameters and, in Python, functions."""
    if path.endswith(CPP):
        code = re.sub(r'//.*|"(?:\\.|[^"\\])*"', "", text(path))
        declared = re.findall(r"([\w>:*&]+)[\s&*]*\b(\w+)\b\s*(?=[=;,({:)\[\]])", code)
        return [name for kind, name in declared if kind not in ("return", "else")]
    names = []
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef) and node.name.strip("_").startswith("of_"):
            names.append(node.name)
    return [name.strip("_") for name in names]


def test_locals_say_what_they_hold():
    counts = collections.Counter()
    for path in files(".py", *CPP):
        parts = Path(path).parts
        folder = "/".join(parts[: 1 + (parts[0] in ("csrc", "fusedops") and len(parts) > 2)])
        counts[folder] += sum(bool(re.fullmatch(EMPTY_NAME, name)) for name in given_names(path))
    more = {folder: n for folder, n in counts.items() if n > EMPTY_NAMES.get(folder, 0)}
    assert not more, f"{EMPTY_NAME} say nothing about a local: name it by what it holds"


def test_no_two_classes_share_a_name():
    """Each training library has its own class of fusedops' callback."""
    homes = collections.defaultdict(list)
    for path in files(".py"):
        if path.startswith("fusedops/"):
            for node in ast.parse(text(path)).body:
                if isinstance(node, ast.ClassDef) and node.name != "FusedOpsCallback":
                    homes[node.name].append(path)
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_no_attribute_hides_a_folder():
    packages = [path for path in files(".py") if re.match("fusedops/.*/__init__", path)]
    hidden = []
    for path in packages:
        package = path.removesuffix("/__init__.py").replace("/", ".")
        parent, _, name = package.rpartition(".")
        importlib.import_module(package)
        if not isinstance(getattr(importlib.import_module(parent), name), ModuleType):
            hidden.append(package)
    assert packages
    assert not hidden


def test_no_public_function_has_the_name_of_a_module():
    modules = {path.stem for path in (ROOT / "fusedops").iterdir()}
    named = {name for name in fusedops.__all__ if name in modules}
    assert not {name for name in named if not isinstance(getattr(fusedops, name), ModuleType)}


def test_nothing_names_the_machine_that_it_was_written_on():
    places = ("home", "root", "Users", "work", "tmp", "workspace", "mnt")
    pattern = rf"(?<![\w.])/(?:{'|'.join(places)})/\w"
    host = socket.gethostname()
    if re.search(r"\d", host):  # `debian` or `localhost` are words as well
        pattern += rf"|\b{re.escape(host)}\b"
    kinds = (".py", ".cpp", ".h", ".cu", ".cuh", ".md", ".toml", ".txt", ".yaml", ".cfg", "")
    found = {p: hits for p in files(*kinds) if (hits := re.findall(pattern, text(p)))}
    assert not found
