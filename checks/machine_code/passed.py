"""Which sources' machine code has passed the gates, so that a test compiles only what changed.

`python -m checks machine-code --write` compiles everything and records the digests of what it
compiled: the kernels, the gates and the compiler's version. A changed digest is compiled again.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from checks.machine_code import ROOT, nvcc

__all__ = ["RECORD", "cuda_digest", "is_recorded", "record", "triton_digest"]

RECORD = ROOT / "checks" / "machine_code" / "passed.json"
GATES = ROOT / "checks" / "machine_code"


def cuda_digest() -> str:
    """Of all CUDA kernels, under the nvcc that is installed."""
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp")]
    return _digest(nvcc.version(), [*nvcc.flags()], [*files, *GATES.rglob("*.py")])


def triton_digest(version: str) -> str:
    """Of all Triton kernels, their launchers and the choices that C++ makes for them."""
    folders = ROOT / "fusedops" / "triton", GATES, ROOT / "csrc" / "ops"
    files = [
        p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".h", ".cpp")
    ]
    return _digest(f"triton {version}", [], files)


def is_recorded(digest: str) -> bool:
    return digest in json.loads(RECORD.read_text()).values()


def record(triton_versions: Iterable[str]) -> None:
    found = {nvcc.version(): cuda_digest()}
    found |= {f"triton {version}": triton_digest(version) for version in triton_versions}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _digest(compiler: str, flags: list[str], files: list[Path]) -> str:
    digest = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for path in sorted(files):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:24]
