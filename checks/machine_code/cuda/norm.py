"""Requires 16-byte memory access in the norms' vectorized CUDA kernels."""

from checks.machine_code.gates import Demand

DEMANDS = {
    "norm_*_held<*": Demand(wide=True),
    "norm_forward_moments<*": Demand(wide=True),
    "norm_forward_parts<*": Demand(wide=True),
    "norm_*_walked<*, 4>": Demand(wide=True),
    "norm_*_walked<*, 8>": Demand(wide=True),
}
