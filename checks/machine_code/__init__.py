"""Checks the machine code of every GPU kernel, without a GPU.

nvcc.py compiles csrc/cuda; launches.py compiles what the Triton launchers launch, in its own
process; sass.py reads what a kernel uses; gates.py judges it; table.py writes it down. Each
family's file (norm.py) has the calls that reach its Triton kernels and its demands on them;
cuda/norm.py has the demands on its CUDA kernels.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "machine_code"
