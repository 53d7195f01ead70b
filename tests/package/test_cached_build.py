"""`fusedops build` compiles a library into the cache, and importing fusedops loads it.

The compiled module is real, and it has the functions of an install without a compiled part. Its
operators have names only.
"""

import fnmatch
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from children import forked

from fusedops import cache, toolchain
from fusedops.cache import cache_folder, publish, work_folder

ROOT = Path(__file__).parents[2]
MODULE = """
#include <Python.h>

// Copies what fusedops/tiny.py has, but for this module's own name and file.
static int fill(PyObject* module) {
  PyObject* exports = PyImport_ImportModule("fusedops.tiny");
  return exports ? PyDict_Merge(PyModule_GetDict(module), PyModule_GetDict(exports), 0) : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void*)fill}, {0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, slots};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  return PyModuleDef_Init(&definition);
}
"""
TINY = f"""
import torch
from fusedops.uncompiled import *
LIBRARY = torch.library.Library("fusedops", "DEF")
for name in {[n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fusedops::")]}:
    LIBRARY.define(f"{{name}}(Tensor x) -> Tensor")
"""
EMPTY = "#pragma once\n"
FILES = {"csrc/python/python.cpp": MODULE, "csrc/precompiled.h": EMPTY, "csrc/cpu/isa/vec.h": EMPTY}
FILES |= {"tiny.py": TINY}
INFO = "from fusedops import extension as e; print(e._C.__file__, e.UNCOMPILED or 'compiled')"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Returns a folder with a copy of the package, in which nothing is compiled."""
    folder = tmp_path_factory.mktemp("tiny")
    skipped = shutil.ignore_patterns("_C*", "__pycache__", "csrc")
    shutil.copytree(ROOT / "fusedops", folder / "fusedops", ignore=skipped)
    for name, text in FILES.items():
        path = folder / "fusedops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def environment(package, cache, **changed):
    unset = ("CXX", "CXXFLAGS", "FUSEDOPS_BACKEND", "FUSEDOPS_COMPILED", "FUSEDOPS_SANITIZE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    base = {"PYTHONPATH": str(package), "FUSEDOPS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return kept | base | changed


def start(package, cache, *args, **changed):
    return forked(*args, cwd=package, env=environment(package, cache, **changed))


def run(package, cache, *args, **changed):
    """Returns the exit status, stdout and stderr."""
    done = start(package, cache, *args, **changed).result()
    return done.returncode, done.stdout, done.stderr


BUILD = ("-m", "fusedops", "build")


@pytest.fixture(scope="module")
def built(package, tmp_path_factory):
    """Returns the cache after a build, and the library in it."""
    cache = tmp_path_factory.mktemp("cache")
    status, printed, errors = run(package, cache, *BUILD)
    assert status == 0, printed + errors
    return cache, Path(printed.splitlines()[-1].removeprefix("compiled "))


def test_the_next_import_uses_the_cache(package, built):
    cache, library = built
    assert library.is_relative_to(cache)
    assert library.name == toolchain.library_name(torch.__version__)
    status, printed, errors = run(package, cache, "-c", INFO, FUSEDOPS_REQUIRE="compiled")
    assert status == 0, errors
    assert printed == f"{library} compiled\n"
    assert f"library       {library}\n" in run(package, cache, "-m", "fusedops", "info")[1]


def test_nothing_else_is_left_behind(built):
    cache, library = built
    left = {path.name for path in cache.rglob("*") if path.is_file()}
    stem = library.name.removesuffix(".so")
    assert left == {f"{stem}.so", f"{stem}.json"}  # in a wheel's folder all of it is packaged
    assert len(list(library.parent.parent.iterdir())) == 1


@pytest.fixture
def script(tmp_path):
    """Returns the console script as pip writes it."""
    path = tmp_path / "fusedops"
    path.write_text("import sys\nfrom fusedops.__main__ import main\nsys.exit(main())\n")
    return str(path)


def test_the_command_in_the_message_runs(package, script, tmp_path):
    """FUSEDOPS_REQUIRE=compiled and a forced backend stop the import, but not the build."""
    asked = {"FUSEDOPS_REQUIRE": "compiled", "FUSEDOPS_BACKEND": "cpu"}
    status, _, errors = run(package, tmp_path, "-c", INFO, **asked)
    message = errors.splitlines()[-1]
    assert status == 1 and message.startswith("ImportError: FUSEDOPS_REQUIRE=compiled")
    assert message.endswith("Compile it: fusedops build")
    for command in ([script], ["-m", "fusedops"]):
        _, printed, _ = run(package, tmp_path, *command, "doctor", **asked)
        assert "problem  kernels " in printed and "fix: fusedops build\n" in printed
    status, printed, errors = run(package, tmp_path, script, "build", **asked)
    assert status == 0, printed + errors
    asked.pop("FUSEDOPS_BACKEND")  # these kernels are none for a CPU
    assert run(package, tmp_path, "-c", INFO, **asked)[0] == 0


def copied(library, folder, **changes):
    """Copies a library and its record to another folder, where they are newer."""
    folder.mkdir(parents=True, exist_ok=True)
    record = json.loads(library.with_suffix(".json").read_text()) | changes
    to = folder / library.name
    to.with_suffix(".json").write_text(json.dumps(record))
    shutil.copy(library, to)
    return to


@pytest.fixture
def inside(package, built):
    """Copies the library to the package's folder."""
    yield copied(built[1], package / "fusedops")
    for path in (package / "fusedops").glob("_C*"):
        path.unlink()


def test_the_newer_of_two_libraries_is_loaded(package, built, inside):
    cache, library = built
    now = time.time()
    os.utime(library, (now, now - 10))
    os.utime(inside, (now, now - 5))
    assert run(package, cache, "-c", INFO)[1] == f"{inside} compiled\n"
    os.utime(library, (now, now))
    assert run(package, cache, "-c", INFO)[1] == f"{library} compiled\n"


def test_a_library_of_another_version_is_refused(package, tmp_path, built, inside):
    copied(built[1], inside.parent, fusedops="0.1.9")
    _, printed, _ = run(package, tmp_path, "-c", INFO)
    assert "compiled from fusedops 0.1.9, but this is fusedops " in printed
    cache, library = built
    assert run(package, cache, "-c", INFO)[1] == f"{library} compiled\n"


def test_kernels_from_other_sources_are_reported(package, tmp_path, built, inside):
    copied(built[1], inside.parent, source="0" * 16)
    printed = run(package, tmp_path, "-m", "fusedops", "doctor")[1]
    assert (
        "warning  kernels    The package's sources have changed since the kernels were compiled."
        in printed
    )


def test_build_variables_are_recorded_and_the_plain_import_finds_the_library(package, tmp_path):
    asked = {"CXX": "g++ -pipe", "CXXFLAGS": "-O1", "DEBUG": "1"}
    status, printed, errors = run(package, tmp_path, *BUILD, "--jobs", "1", **asked)
    assert status == 0, printed + errors
    library = Path(printed.splitlines()[-1].removeprefix("compiled "))
    assert json.loads(library.with_suffix(".json").read_text())["flags"] == asked
    assert run(package, tmp_path, "-c", INFO)[1] == f"{library} compiled\n"
    assert "CXXFLAGS='-O1'" in run(package, tmp_path, "-m", "fusedops", "info")[1]


def finished(cache):
    """Libraries outside of builders' own folders, which may vanish at any time."""
    for folder, _, names in os.walk(cache):
        if ".build-" not in folder:
            yield from (Path(folder, name) for name in fnmatch.filter(names, "_C_torch*.so"))


def test_two_builds_at_a_time(package, tmp_path):
    """An import in between finds no library or a complete one, with its record."""
    builders = [start(package, tmp_path, *BUILD) for _ in range(2)]
    while not all(builder.has_ended() for builder in builders):
        for library in finished(tmp_path):
            assert json.loads(library.with_suffix(".json").read_text())
        printed = run(package, tmp_path, "-c", INFO)[1]
        assert printed.endswith((" compiled\n", " not compiled on this machine\n"))
    for builder in builders:
        builder.printed()
    assert run(package, tmp_path, "-c", INFO)[1].endswith(" compiled\n")


def test_a_failed_compile_points_at_the_compilers_message(package, tmp_path):
    status, printed, errors = run(package, tmp_path, *BUILD, CXXFLAGS="-include no_such_file.h")
    assert status == 1 and "no_such_file.h: No such file" in printed
    assert errors.splitlines()[-1] == "fusedops build: the compiler failed, see above"
    assert "Traceback" not in errors and not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("arguments", "changed", "words"),
    [
        (("--jobs", "0"), {}, "--jobs must be a whole number above 0, got '0'"),
        (("--jobs", "-1"), {}, "--jobs must be a whole number above 0, got '-1'"),
        ((), {"MAX_JOBS": "all"}, "MAX_JOBS must be a whole number above 0, got 'all'"),
        ((), {"CXX": '"'}, "CXX must be a command, got '\"': No closing quotation"),
    ],
)
def test_settings_that_cannot_be(package, tmp_path, arguments, changed, words):
    status, _, errors = run(package, tmp_path, *BUILD, *arguments, **changed)
    assert status == 1 and errors == f"fusedops build: {words}\n"


def test_a_cache_that_cannot_be_written_is_found_before_compiling(package, tmp_path):
    (tmp_path / "file").touch()
    status, printed, errors = run(package, tmp_path / "file", *BUILD)
    assert status == 1 and not printed
    assert f"cannot write to {tmp_path / 'file'}" in errors
    assert errors.endswith(". Set FUSEDOPS_CACHE to a folder that you can write to\n")


def test_objects_are_made_among_the_caches(tmp_path, monkeypatch):
    """The system's temporary folder may be small, or in memory."""
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path / "cache"))
    with work_folder() as work:
        assert work.is_dir() and work.is_relative_to(tmp_path / "cache")
    assert not work.exists()


# As on a machine where the user may not look into the cache, or has no home folder.
REFUSED = """
import pathlib, sys
for name in ("exists", "lstat", "stat"):
    def refuse(path, *args, real=getattr(pathlib.Path, name), **kwargs):
        if "refused" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)
    setattr(pathlib.Path, name, refuse)
"""
NO_HOME = """
import os, pwd
def missing(uid):
    raise KeyError(uid)
pwd.getpwuid = missing
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
"""
DOCTOR = "\nfrom fusedops import doctor\ndoctor.run()\n"


@pytest.mark.parametrize(
    ("before", "cache", "words"),
    [
        (REFUSED, "/refused", "the cache cannot be read: [Errno 13] Permission denied"),
        ("", "/" + "x" * 300, "the cache cannot be read: [Errno 36] File name too long"),
        (NO_HOME, "", "there is no home folder for a cache: set FUSEDOPS_CACHE"),
        (NO_HOME, "/nowhere", "not compiled on this machine"),
    ],
    ids=["permission", "too long", "no home", "no home but a cache"],
)
def test_a_cache_that_cannot_be_read_is_a_reason(package, before, cache, words):
    status, printed, errors = run(package, cache, "-c", before + INFO + DOCTOR)
    assert status == 0, errors
    reason, *findings = printed.splitlines()
    assert words in reason
    (at,) = [i for i, line in enumerate(findings) if line.split()[1] == "cache"]
    if cache != "/nowhere":
        assert "set FUSEDOPS_CACHE" in findings[at + 1]


def test_a_record_comes_before_its_library(tmp_path, monkeypatch):
    """A process that finds the library also finds its record."""
    built, names, replace = tmp_path / "made.so", [], os.replace
    built.write_bytes(b"library")

    def recorded(source, to):
        names.append(Path(to).suffix)
        replace(source, to)

    monkeypatch.setattr(os, "replace", recorded)
    library = publish(built, toolchain.Torch(tmp_path, torch.__version__), tmp_path / "into")
    assert names == [".json", ".so"]
    assert library.read_bytes() == b"library" and library.stat().st_mode & 0o777 == 0o755


def test_each_source_is_in_the_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    files = [tmp_path / name for name in ("building.py", "toolchain.py", "csrc/a.cpp", "csrc/b.h")]
    for file in files:
        file.write_text("as it was")
    hashes = {cache.source_hash.__wrapped__()}
    for file in files:
        file.write_text("changed")
        hashes.add(cache.source_hash.__wrapped__())
    assert len(hashes) == 5


def test_the_name_of_a_cache_folder(monkeypatch):
    """It has torch's CUDA version and sanitizers, because their libraries differ."""
    monkeypatch.setenv("FUSEDOPS_CACHE", "/cache")
    monkeypatch.delenv("FUSEDOPS_SANITIZE", raising=False)
    names = [cache_folder("2.13.1+x", cuda) for cuda in (None, "12.6", "13.0")]
    monkeypatch.setenv("FUSEDOPS_SANITIZE", "address,undefined")
    names.append(cache_folder("2.13.0", None))
    assert len({*names}) == 4
    assert names[0].name.startswith("torch2.13-cpu-cpython-3")
    assert names[1].name.startswith("torch2.13-cu12.6-")
    assert names[3].name == f"{names[0].name}-address_undefined"
