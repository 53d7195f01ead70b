"""Requires AdamW's CUDA kernels to access memory 16 bytes at a time."""

from checks.machine_code.gates import Demand

DEMANDS = {
    "adamw_step": Demand(wide=True),
    "adamw_scale": Demand(wide=True),
}
