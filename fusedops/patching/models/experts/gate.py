"""Recognises an experts module's gate (the activation between its two matmuls) by running it."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.patching.core.probing import F32, F64, drawn, within
from fusedops.references.experts import gate_reference

__all__ = ["Gate", "recognised"]

ACTIVATIONS = "silu", "gelu", "gelu_tanh", "relu", "relu2", None
PLACES = 48  # gates in each row that is tried
SCALES = 1.0, 8.0, 100.0  # of the numbers that are tried, so that limits show


@dataclass(frozen=True)
class Gate:
    """The options of `experts` that follow from a module's gate."""

    activation: str | None
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __call__(self, z: Tensor) -> Tensor:
        return gate_reference(z, **asdict(self))

    @property
    def name(self) -> str:
        """The gate as the report shows it: `experts(silu, limit=7.0)`."""
        changed = [
            f"{key}={value}"
            for key, value in asdict(self).items()
            if key != "activation" and value != getattr(PLAIN, key)
        ]
        return f"experts({', '.join([str(self.activation), *changed])})"


PLAIN = Gate("silu")


def recognised(module: Any, device: str) -> Gate | None:
    """The gate that gives what the module's own code gives; None if no candidate does.

    The module has transformers' `has_gate` and either `_apply_gate` or `act_fn`.
    """
    draw = torch.Generator().manual_seed(0)
    width = 2 * PLACES if module.has_gate else PLACES
    inputs = [(scale * drawn(draw, 8, width, dtype=F64)).to(device) for scale in SCALES]
    run = module._apply_gate if module.has_gate else module.act_fn
    expected = [run(z.to(F32)) for z in inputs]
    matching = (gate for gate in _candidates(module) if _gives(gate, inputs, expected))
    return next(matching, None)


def _gives(gate: Gate, inputs: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether the gate gives the expected values at every scale; at a single one, most would."""
    pairs = zip(inputs, expected, strict=True)
    return all(
        w.shape == (gated := gate(z.to(F32).to(F64))).shape
        and within(w, gated, 16 * torch.finfo(F32).eps)
        for z, w in pairs
    )


def _candidates(module: nn.Module) -> Iterator[Gate]:
    """Gates with the module's own numbers as limit and alpha, the simplest first."""
    if not module.has_gate:
        yield from (Gate(name, gated=False) for name in ACTIVATIONS)
        return
    numbers = sorted({float(v) for v in vars(module).values() if _is_number(v)})
    limits, alphas = (None, *numbers), (1.0, 1.702, *numbers)
    for interleaved, limit, offset in itertools.product((False, True), limits, (0.0, 1.0)):
        for name in ACTIVATIONS:
            for alpha in alphas if name == "silu" else (1.0,):
                yield Gate(name, True, interleaved, limit, alpha, offset)


def _is_number(value: object) -> bool:
    """Whether it may be a limit or a factor: sizes are larger integers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= 100
