"""Names and places of compiled parts. Standard library only: it runs where torch is absent."""

import hashlib
import importlib.metadata
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["cache_folder", "library_name"]

PACKAGE = Path(__file__).resolve().parent


def library_name(torch_version: str) -> str:
    """The file name of the compiled part for one torch minor and this Python."""
    major, minor = torch_version.split(".")[:2]
    return f"_C_torch{major}_{minor}{EXTENSION_SUFFIXES[0]}"


def cache_folder(torch_version: str, cxx11_abi: bool) -> Path:
    """Where `fusedops build` puts the compiled part of these sources for this torch and Python."""
    root = os.environ.get("FUSEDOPS_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    minor = ".".join(torch_version.split(".")[:2])
    python = f"{sys.implementation.name}-{sys.version_info.major}{sys.version_info.minor}"
    name = f"torch{minor}-cxx11abi{int(cxx11_abi)}-{python}-{source_hash()}"
    version = importlib.metadata.version("fusedops")
    return (Path(root) if root else Path(caches) / "fusedops") / version / name


def source_hash() -> str:
    """16 hex digits of the C++ sources' paths and contents; zeros where there are none."""
    folders = (PACKAGE / "csrc", PACKAGE.parent / "csrc")
    csrc = next((folder for folder in folders if folder.is_dir()), None)
    if csrc is None:
        return "0" * 16
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.is_file()):
        digest.update(path.relative_to(csrc).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
