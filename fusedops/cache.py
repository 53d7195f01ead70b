"""Where compiled libraries are, and the record beside each.

`fusedops build` leaves a library in a cache folder, and the import looks for it there. A record
says what a library was compiled from and for. Needs the standard library alone.
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

# What changes a library beside its sources and torch; a record has those that were set.
FLAGS = ("CXX", "CXXFLAGS", "LDFLAGS", "TORCH_CUDA_ARCH_LIST", "DEBUG", "FUSEDOPS_SANITIZE")


def caches(environment: Mapping[str, str]) -> Path:
    """$FUSEDOPS_CACHE, else $XDG_CACHE_HOME/fusedops, else ~/.cache/fusedops.

    Raises RuntimeError where the user has no home folder and neither variable is set.
    """
    if own := environment.get("FUSEDOPS_CACHE"):
        return Path(own)
    if shared := environment.get("XDG_CACHE_HOME"):
        return Path(shared, "fusedops")
    home = os.path.expanduser("~")
    if home == "~":
        raise RuntimeError("there is no home folder for a cache: set FUSEDOPS_CACHE to a folder")
    return Path(home, ".cache", "fusedops")


def versions_folder() -> Path:
    """The folder with every cached library for this version of the package."""
    return caches(os.environ) / version()


def cache_folder(torch_version: str, cxx11_abi: bool, cuda: str | None) -> Path:
    """Where `fusedops build` leaves the library for a torch, and the import looks for it.

    A folder for each version of the package, torch's minor version, CUDA (of torch, or "cpu") and
    C++ ABI, Python, and the sources. A library with sanitizers has a folder of its own, as a plain
    process cannot load it. Other build variables do not choose a folder, because an import happens
    without them; the record names them.
    """
    minor = ".".join(torch_version.split(".")[:2])
    device = f"cu{cuda}" if cuda else "cpu"
    python = str(sys.implementation.cache_tag)
    parts = [f"torch{minor}", device, f"cxx11abi{cxx11_abi:d}", python, source_hash()]
    if sanitizers := os.environ.get("FUSEDOPS_SANITIZE"):
        parts.append(re.sub(r"\W+", "_", sanitizers))
    return versions_folder() / "-".join(parts)


def installed_cache_folder() -> Path:
    """`cache_folder` of the installed torch."""
    import torch

    return cache_folder(torch.__version__, torch.compiled_with_cxx11_abi(), torch.version.cuda)


def version() -> str:
    """The package's, which may not be installed yet."""
    found = re.search(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.M)
    assert found is not None
    return found[1]


@functools.cache
def source_hash() -> str:
    """16 hexadecimal digits of the paths and contents of csrc and of what chooses its flags."""
    digest = hashlib.sha256()
    for name in ("building.py", "toolchain.py"):
        digest.update((PACKAGE / name).read_bytes())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in SUFFIXES:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def record(torch: Torch) -> dict[str, object]:
    """What is written beside a library."""
    about = {"torch": torch.version, "cxx11_abi": torch.cxx11_abi, "cuda": torch.cuda}
    flags = {name: value for name in FLAGS if (value := os.environ.get(name))}
    own = {"simt": torch.simt, "fusedops": version(), "source": source_hash(), "flags": flags}
    return about | own


def publish(made: Path, torch: Torch, folder: Path) -> Path:
    """Copies a library into a folder. Its record comes first: an import needs both."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / library_name(torch.version)
    with locked(folder):
        _replace(library.with_suffix(".json"), json.dumps(record(torch)).encode() + b"\n", 0o644)
        _replace(library, made.read_bytes(), 0o755)
    return library


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder among the caches. Raises RuntimeError where none can be made."""
    root = versions_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=".build-", dir=root)
    except OSError as error:
        raise RuntimeError(
            f"cannot write to {root}: {error.strerror}. "
            "Set FUSEDOPS_CACHE to a folder that you can write to"
        ) from error
    with made as folder:
        yield Path(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file or a folder: another process waits for it here."""
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


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file at once: a reader gets the whole old file or the whole new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        made.write(content)
    os.chmod(made.name, mode)
    os.replace(made.name, path)
