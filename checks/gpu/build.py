"""Compiles the extension in place for this machine's GPU: `python -m checks.gpu.build`."""

import os
import subprocess
import sys

import torch

from checks.gpu import ROOT


def architecture() -> str:
    """The GPU as TORCH_CUDA_ARCH_LIST spells it, with its own features: 9.0a, 8.6."""
    if not torch.cuda.is_available():
        raise SystemExit(f"needs a GPU: torch {torch.__version__} finds no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def main() -> int:
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or architecture()
    asked = {"FUSEDOPS_CUDA": "1", "FUSEDOPS_REQUIRE": "compiled", "TORCH_CUDA_ARCH_LIST": archs}
    for stamp in (ROOT / "build").glob(".built-*"):  # `make build` must build again
        stamp.unlink()
    command = [sys.executable, "setup.py", "egg_info", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | asked, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
