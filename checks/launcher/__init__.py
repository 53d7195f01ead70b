"""Checks and times fusedops' launcher of compiled Triton kernels, without a GPU.

libcuda.c replaces CUDA's driver; stub.py puts Triton's own CUDA driver on top of it. compare.py
launches everything that the families launch through Triton and through fusedops, and compares what
reaches the driver. hostile.py compares the keys of hostile arguments. timing.py measures the host's
time. Each runs in a process of its own, with the triton that `--triton` names.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "launcher"
