"""Requires 16-byte memory access in the gated activations' CUDA kernels."""

from checks.machine_code.gates import Demand

DEMANDS = {
    "gated_*<*, 4>": Demand(wide=True),
    "gated_*<*, 8>": Demand(wide=True),
}

KINDS = ("swiglu", "swiglu limited", "geglu", "geglu tanh")  # csrc/kernels/gated_activation.h
NAMES = {f"GatedKind {i}": kind for i, kind in enumerate(KINDS)}
