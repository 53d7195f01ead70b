"""Random calls of `experts` match the reference.

A failure prints its `Call`.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from contract.fuzzing import (
    FLOATS,
    Call,
    Drawn,
    assert_as_good,
    drawn,
    evaluated,
    ours,
    redrawn,
    with_gradients,
)
from hypothesis import given
from hypothesis import strategies as st

from experts.cases import BACKENDS
from fusedops.references.experts import experts_reference

OPTIONS = ("silu", "gelu", "gelu_tanh", "relu2", None)


@dataclass(frozen=True)
class Chosen(Drawn):
    """An index to make: choices from 0 to `below`, without repetition within a token."""

    below: int = 1

    def tensor(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.shape[0], self.below, generator=draw).argsort(1)[:, : self.shape[1]]


def is_finite(drawn: Drawn) -> bool:
    return "inf" not in drawn.values


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draws a call that the function's docstring allows."""
    dtype = draw(st.sampled_from(FLOATS))
    tokens, experts = draw(st.integers(0, 40)), draw(st.integers(1, 9))
    sentinel = draw(st.booleans())
    k = draw(st.integers(0, min(experts + sentinel, 4)))
    hidden, inner = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    gated, transposed = draw(st.booleans()), draw(st.booleans())
    wide = 2 * inner if gated else inner
    activation = draw(st.sampled_from(OPTIONS))
    weights_dtype = draw(st.sampled_from([dtype, torch.float32]))
    shapes = (experts, wide, hidden), (experts, hidden, inner)
    first, second = ((e, b, a) if transposed else (e, a, b) for e, a, b in shapes)
    arguments: dict[str, Any] = {
        "hidden": draw(drawn((tokens, hidden), dtype)),
        # An infinite one gives inf or NaN by the order of the products in the backward.
        "top_k_weights": draw(drawn((tokens, k), weights_dtype).filter(is_finite)),
        "gate_up": draw(drawn(first, dtype)),
        "down": draw(drawn(second, dtype)),
        "gate_up_bias": draw(st.none() | drawn((experts, wide), dtype)),
        "down_bias": draw(st.none() | drawn((experts, hidden), dtype)),
        "activation": activation,
        "gated": gated,
        "transposed": transposed,
        "interleaved": gated and draw(st.booleans()),
        "alpha": draw(st.sampled_from([1.0, 1.702])) if activation == "silu" else 1.0,
        "up_offset": draw(st.sampled_from([0.0, 1.0])) if gated else 0.0,
    }
    call = draw(with_gradients("experts", arguments))
    index = Chosen((tokens, k), torch.int64, below=experts + sentinel)
    return replace(call, arguments=call.arguments | {"top_k_index": index})


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_as_the_reference(backend, data):
    call = data.draw(calls()).on(backend)
    outcome = ours(call, backend)
    exactly, eager, exact = evaluated(call, outcome, experts_reference)
    assert_as_good(
        outcome, eager, exact, lambda key: redrawn(call, experts_reference, exactly, key)
    )
