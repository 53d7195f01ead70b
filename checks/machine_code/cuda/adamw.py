"""Requires 16-byte memory access in AdamW's CUDA kernels."""

from checks.machine_code.gates import Demand

DEMANDS = {
    "adamw_step": Demand(wide=True),
    "adamw_scale": Demand(wide=True),
    "adamw_squares": Demand(reads=True),  # each block writes one partial sum
}
