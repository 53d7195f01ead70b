"""Finds and fills the cache folders of compiled libraries.

`fusedops build` puts a library into a cache folder, and the import looks for it there. The record
next to a library says what it was compiled from and for. Needs only the standard library.
"""

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fusedops.toolchain import PACKAGE, ROOT, SUFFIXES, Torch, library_name

# Variables that affect a library, in addition to its sources and torch; a record stores them.
FLAGS = ("CXX", "CXXFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST", "DEBUG", "FUSEDOPS_SANITIZE")


def caches(environment: Mapping[str, str]) -> Path:
    """The root of all caches: $FUSEDOPS_CACHE, $XDG_CACHE_HOME/fusedops or ~/.cache/fusedops.

    Raises RuntimeError if the user has no home folder and neither variable is set.
    """
    if folder := environment.get("FUSEDOPS_CACHE"):
        return Path(folder)
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared, "fusedops")
    home = os.path.expanduser("~")
    if home == "~":
        raise RuntimeError("there is no home folder for a cache: set FUSEDOPS_CACHE to a folder")
    return Path(home, ".cache", "fusedops")


def versions_folder() -> Path:
    """The folder with all cached libraries for this version of the package."""
    return caches(os.environ) / version()


def cache_folder(torch_version: str, cuda: str | None) -> Path:
    """The folder where `fusedops build` puts the library for a torch, and the import finds it.

    Its name contains the package's version, torch's minor version, CUDA (or "cpu"), the Python, and
    the sources' hash. A library with sanitizers has its own folder, because a plain process cannot
    load it. Other build variables do not change the folder, because they are usually not set at
    import; the record stores them.
    """
    minor = ".".join(torch_version.split(".")[:2])
    device = f"cu{cuda}" if cuda else "cpu"
    python = str(sys.implementation.cache_tag)
    parts = [f"torch{minor}", device, python, source_hash()]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        parts.append(re.sub(r"\W+", "_", sanitizers))
    return versions_folder() / "-".join(parts)


def installed_cache_folder() -> Path:
    """`cache_folder` for the installed torch."""
    import torch

    return cache_folder(torch.__version__, torch.version.cuda)


def version() -> str:
    """The package's version, read from its source because it may not be installed yet."""
    match = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    assert match is not None
    return match[1]


@functools.cache
def source_hash() -> str:
    """A hash of csrc and of the modules that choose its flags: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in ("building.py", "toolchain.py"):
        digest.update((PACKAGE / name).read_bytes())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in SUFFIXES:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def record(torch: Torch) -> dict[str, object]:
    """The record that is written next to a library."""
    about = {"torch": torch.version, "cuda": torch.cuda}
    flags = {name: value for name in FLAGS if (value := os.environ.get(name))}
    build = {"simt": torch.simt, "fusedops": version(), "source": source_hash(), "flags": flags}
    return about | build


def publish(compiled: Path, torch: Torch, folder: Path) -> Path:
    """Copies a library into a folder. The record is written first: an import needs both."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / library_name(torch.version)
    with locked(folder):
        replace(library.with_suffix(".json"), json.dumps(record(torch)).encode() + b"\n", 0o644)
        replace(library, compiled.read_bytes(), 0o755)
    return library


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder inside the cache. Raises RuntimeError if it cannot be created."""
    root = versions_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=".build-", dir=root)
    except OSError as error:
        raise RuntimeError(
            f"cannot write to {root}: {error.strerror}. "
            "Set FUSEDOPS_CACHE to a folder that you can write to"
        ) from error
    with temporary as folder:
        yield Path(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file or a folder for the block; other processes wait here."""
    import fcntl  # not on Windows, where nothing is compiled

    opened = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another build: {path} is locked", flush=True)
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def replace(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file atomically: a reader gets the whole old file or the whole new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, mode)
    os.replace(file.name, path)
