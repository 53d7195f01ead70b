"""Random rotary_embedding calls for tests/contract/test_fuzz.py."""

from functools import partial
from typing import Any

import torch
from contract.fuzzing import (
    FLOATS,
    RECEIVED,
    SIZES,
    Call,
    Drawn,
    Fuzz,
    assert_as_good,
    broken,
    drawn,
    evaluated,
    redrawn,
    right_or_refused,
    wrong_tensors,
)
from hypothesis import strategies as st

from fusedops.references.rotary import rotary_embedding_reference
from fusedops.testing import backends

OP = "rotary_embedding"


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = 4096) -> Call:
    """A call that the function's docstring allows: cos has all of q's dimensions but the heads."""
    sizes = st.integers(0, 5) | st.sampled_from(SIZES)
    places = [min(draw(sizes), 40) for _ in range(draw(st.sampled_from([2, 2, 2, 1, 1, 0, 3])))]
    rotary = 2 * draw(st.integers(0, 20) | st.sampled_from([32, 64]))
    past = draw(st.sampled_from([0, 0, 0, 1, 8, 16, 35]))
    heads = [draw(st.integers(0, 4) | st.sampled_from([8, 9])) for _ in range(2)]
    for i in range(len(places)):  # no more than `max_size` positions
        places[i] = min(places[i], max_size // 256)
    at = draw(st.integers(0, len(places)))
    dtypes = st.sampled_from(FLOATS)
    usual, table = draw(dtypes), draw(dtypes)
    table = usual if draw(st.booleans()) else table
    shapes = [(*places[:at], h, *places[at:], rotary + past) for h in heads]
    table_shape = [1 if draw(st.integers(0, 4)) == 0 else size for size in places]
    if draw(st.integers(0, 4)) == 0 and at > 0:
        table_shape, at = table_shape[1:], at - 1
    arguments: dict[str, Any] = {
        "q": draw(drawn(shapes[0], usual)),
        "k": draw(drawn(shapes[1], usual if draw(st.integers(0, 4)) else draw(dtypes))),
        "cos": draw(drawn((*table_shape, rotary), table)),
        "sin": draw(drawn((*table_shape, rotary), table)),
        "unsqueeze_dim": at if draw(st.booleans()) else at - len(table_shape) - 2,
        "interleaved": draw(st.booleans()),
    }
    grads = draw(st.sampled_from([["q", "k"], ["q", "k"], ["q"], ["k"], [], ["q", "cos", "sin"]]))
    return Call(op, arguments, frozenset(grads), draw(st.sampled_from(list(RECEIVED))))


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Invalid values to try in place of a valid one."""
    if name == "interleaved":
        return [None, "halves", 1.5]
    if name == "unsqueeze_dim":
        return [-1, 5, -6, 100, -100, 1.5, None]
    like = arguments[name]
    return [*wrong_tensors(like), 1, None, torch.zeros(like.shape, device="meta")]


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Assert that what we give is as good as what the reference gives in the inputs' dtype."""
    exactly, *others = evaluated(call, ours, rotary_embedding_reference)
    rounded = partial(redrawn, call, rotary_embedding_reference, exactly)
    assert_as_good(ours, *others, rounded)


# What the fuzz has found, and what it draws too rarely.
EXAMPLES: dict[str, Call] = {
    "gradients of an empty table": Call(
        OP,
        {
            "q": Drawn((3, 1, 5)),
            "k": Drawn((2, 1, 5)),
            "cos": Drawn((1, 0)),
            "sin": Drawn((1, 0)),
            "unsqueeze_dim": 0,
        },
        frozenset({"q", "cos", "sin"}),
    ),
    "strides of their own": Call(
        OP,
        {
            "q": Drawn((2, 6, 9, 64), torch.bfloat16, "slice of rows"),
            "k": Drawn((2, 2, 9, 64), torch.bfloat16, "rows transposed", seed=1),
            "cos": Drawn((2, 9, 64), torch.bfloat16, "every second row", seed=2),
            "sin": Drawn((2, 9, 64), torch.bfloat16, "one row expanded", seed=3),
        },
        frozenset({"q", "k"}),
        "transposed",
    ),
}


FUZZ = Fuzz(
    calls=calls,
    backends={OP: backends(OP)},
    compare=compare,
    mistakes=lambda op: broken(calls(op, 512), wrong_values),
    judge=right_or_refused(compare),
    examples=EXAMPLES,
    example_backends=backends(OP),
)
