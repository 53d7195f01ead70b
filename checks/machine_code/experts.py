"""Launches of the Triton mixture-of-experts kernels, and requirements on their machine code.

Products in blocks of 64 or more rows use tensor cores in bfloat16. The other kernels have no demand
beyond no spills.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from checks.machine_code.gates import Demand
from checks.machine_code.launches import Launch
from fusedops.triton.experts import products, rows
from fusedops.triton.experts.routing import Routing

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EXPERTS, WIDTH, INNER = 4, 256, 128
GATES = {
    "silu": ("silu", True, False, None, 1.0, 0.0),
    "gelu_tanh": ("gelu_tanh", True, False, None, 1.0, 0.0),
    "gpt_oss": ("silu", True, True, 7.0, 1.702, 1.0),
    "plain gelu": ("gelu", False, False, None, 1.0, 0.0),
}


def calls(quick: bool) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """(variant, case, call): few and many rows of an expert, both layouts; a selection if quick."""
    for name, dtype in DTYPES.items():
        for tokens in (8, 512):
            for transposed in (False, True):
                case = f"{tokens} tokens{', transposed' * transposed}"
                yield f"experts, {name}", case, partial(run_products, tokens, dtype, transposed)
        for gate in list(GATES)[: 1 if quick else None]:
            yield f"experts, {name}, {gate}", "rows", partial(run_rows, gate, dtype)


def routing_of(tokens: int) -> Routing:
    index = torch.zeros(tokens, 2, dtype=torch.int64)
    return Routing.of(index, torch.empty(tokens, 2, dtype=torch.float32), EXPERTS)


def run_products(tokens: int, dtype: torch.dtype, transposed: bool) -> None:
    routing = routing_of(tokens)

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    w = empty(EXPERTS, WIDTH, INNER).transpose(1, 2) if transposed else empty(EXPERTS, INNER, WIDTH)
    x, out = empty(tokens, WIDTH), empty(routing.rows, INNER)
    products.product(routing, x, w, empty(EXPERTS, INNER), out, gathers=True)
    wide = empty(routing.rows, WIDTH, dtype=torch.float32)
    products.product(routing, out, w.transpose(1, 2), None, wide)
    products.outer(routing, out, x, empty(*w.shape), gathers=True)
    products.outer(routing, out, empty(routing.rows, WIDTH), empty(*w.shape))
    weights = torch.empty(routing.rows, dtype=torch.float32)
    products.sums_of_rows(routing, out, weights, empty(EXPERTS, INNER))


def run_rows(gate: str, dtype: torch.dtype) -> None:
    routing, options = routing_of(8), rows.Gate(*GATES[gate])
    n, count = INNER, routing.rows
    z = torch.empty(count, 2 * n if GATES[gate][1] else n, dtype=dtype)
    h, dots = torch.empty(count, n, dtype=dtype), torch.empty(count, dtype=torch.float32)
    rows.gate(z, h, options)
    rows.gate_backward(z, h.float(), dots, h, torch.empty_like(z), dots, options)
    bias, y = torch.empty(EXPERTS, n, dtype=dtype), torch.empty(8, n, dtype=dtype)
    rows.sum_slots(routing, h.float(), routing.weights, bias, y)
    rows.sum_slots(routing, h.float(), None, None, y)


def demand(launch: Launch) -> Demand:
    """Demands tensor cores of products of bfloat16, at full rate, which takes 64 rows."""
    named = launch.kernel.__name__ in ("product_kernel", "outer_kernel")
    narrow = "*bf16" in (launch.types.get("x"), launch.types.get("a"))
    return Demand(dot=named and narrow and launch.constants["M"] >= 64)
