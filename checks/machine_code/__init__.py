"""Gates on the machine code of every GPU kernel, without a GPU.

nvcc.py compiles csrc/cuda; launches.py compiles what the Triton launchers launch, in a process of
its own; sass.py reads what a kernel uses; gates.py judges it; table.py writes it down. A family's
file (norm.py) holds the calls that reach its kernels and what it demands of them.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "machine_code"
