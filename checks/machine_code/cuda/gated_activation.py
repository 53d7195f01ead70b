"""Requires 16-byte memory access in the gated activations' vectorized CUDA kernels."""

from checks.machine_code.gates import Demand

# Not gated_codes, which stores one byte per element.
DEMANDS = {
    "gated_[!c]*<*, 4>": Demand(wide=True),
    "gated_[!c]*<*, 8>": Demand(wide=True),
}

KINDS = ("swiglu", "swiglu limited", "geglu", "geglu tanh")  # csrc/kernels/gated_activation.h
NAMES = {f"GatedKind {i}": kind for i, kind in enumerate(KINDS)}
