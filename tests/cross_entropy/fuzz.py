"""Random cross-entropy calls for tests/contract/test_fuzz.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from contract.fuzzing import (
    FLOATS,
    SIZES,
    Call,
    Drawn,
    Fuzz,
    Redrawn,
    Rounded,
    assert_as_good,
    broken,
    drawn,
    evaluated,
    ours,
    results,
    right_or_refused,
    says_what_is_wrong,
    wrong_tensors,
)
from hypothesis import strategies as st

from fusedops.references.cross_entropy import (
    cross_entropy_reference,
    linear_cross_entropy_reference,
)
from fusedops.testing import backends

OPS = ["cross_entropy", "linear_cross_entropy"]
SLOW = [] if torch.cuda.is_available() else ["triton"]  # the interpreter, which truncates bfloat16
MOST = 1 << 18  # multiply-adds


@dataclass(frozen=True)
class Targets(Drawn):
    """Class indices; if requested, a third of them is ignored."""

    classes: int = 1
    ignored: bool = False

    def tensor(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        target = torch.randint(0, max(1, self.classes), self.shape, generator=draw)
        out = torch.rand(self.shape, generator=draw) < (0.3 if self.ignored else 0)
        return target.masked_fill(out | (self.classes == 0), -100)


class Weights(Drawn):
    """Of classes. Where those of the targets cancel, their mean is past what a dtype can tell."""

    def tensor(self) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.shape, generator=draw).add(0.1).to(self.dtype)


REFERENCES = {
    "cross_entropy": cross_entropy_reference,
    "linear_cross_entropy": linear_cross_entropy_reference,
}

# A row that is ignored has no NaN here: ours has no gradient of one, torch's is NaN.
FINITE = {"normal", "far from zero", "zeros", "constant", "small", "tiny", "denormal"}
OPTIONS = {
    "reduction": st.sampled_from(["mean", "sum", "none"]),
    "label_smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    "z_loss": st.sampled_from([0.0, 0.0, 1e-3, 1.0]),
    "softcap": st.sampled_from([None, None, 1.0, 30.0]),
    "scale": st.sampled_from([None, None, 0.1, -1.0, 16.0]),
    "dtype": st.sampled_from([None, torch.float32]),
}


@st.composite
def calls(draw: st.DrawFn, op: str, max_size: int = MOST) -> Call:
    """Draws a call that the function's docstring allows."""
    dtype = draw(st.sampled_from(FLOATS))
    size = st.integers(1, 9) | st.sampled_from(SIZES)
    if op == "cross_entropy":
        max_size = min(max_size, 32768)
    classes = min(max(1, draw(size)), max_size)
    rows = min(draw(size), max_size // classes)
    tensors: dict[str, Any] = {}
    if op == "cross_entropy":
        shape: tuple[int, ...] = (rows,)
        if rows and draw(st.integers(0, 3)) == 0:
            shape = (1, rows)
        whole = (shape[0], classes, *shape[1:])
        tensors["input"] = draw(drawn(whole, dtype))
    else:
        features = min(
            draw(st.integers(0, 9) | st.sampled_from(SIZES)), max_size // (classes * max(1, rows))
        )
        shape = draw(st.sampled_from([(rows,), (1, rows), (rows, 1)]))
        tensors["input"] = draw(drawn((*shape, features), dtype))
        tensors["linear_weight"] = draw(drawn((classes, features), dtype))
        tensors["linear_bias"] = draw(st.none() | drawn((classes,), dtype))
    leaves = sorted(k for k, v in tensors.items() if v is not None)
    target = Targets(
        shape,
        torch.int64,
        seed=draw(st.integers(0, 999)),
        classes=classes,
        ignored=draw(st.booleans()) and all(tensors[k].values in FINITE for k in leaves),
    )
    options = draw(st.fixed_dictionaries(OPTIONS))
    if op == "cross_entropy":
        options["grad_in_forward"] = draw(st.booleans())
    weight = draw(st.none() | st.builds(Weights, st.just((classes,)), st.just(dtype)))
    grads = frozenset(draw(st.lists(st.sampled_from(leaves))))
    arguments = tensors | {"target": target, "weight": weight} | options
    return Call(op, arguments, grads)


def wrong_values(name: str, arguments: dict[str, Any]) -> list[Any]:
    """Returns invalid values to try in place of a valid one."""
    wrong = {
        "reduction": ["avg", "", "MEAN", None],
        "label_smoothing": [-0.1, 1.5, math.nan, "1"],
        "z_loss": ["1", None, 1j],
        "softcap": [0.0, -1.0, math.nan, "1"],
        "scale": ["1", 1j],
        "dtype": [torch.int64, torch.float64, "float32"],
        "grad_in_forward": ["1", 2.5],
    }
    if name in wrong:
        return wrong[name]
    like = arguments[name] or Drawn((3,), torch.float32)
    invalid = wrong_tensors(like)
    if name == "target":
        classes = torch.full(like.shape, like.classes)
        invalid += [classes, -1 - classes]
    return invalid


def product_of_terms(input, linear_weight, target, linear_bias=None, **kwargs):
    z = (input.unsqueeze(-2) * linear_weight).sum(-1)
    z = (z if linear_bias is None else z + linear_bias).flatten(0, -2)
    loss = loss_of_terms(z, target.flatten(), **kwargs)
    return loss.view(target.shape) if loss.dim() else loss


def loss_of_terms(
    input,
    target,
    weight=None,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    scale=None,
    dtype=None,
    grad_in_forward=False,
):
    z = input.movedim(1, -1) * (1 if scale is None else scale)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = z.new_ones(z.shape[-1]) if weight is None else weight
    live = target != -100
    at = torch.where(live, target, 0)
    wt = torch.where(live, w[at], 0)
    over = z - z.detach().amax(-1, keepdim=True) if z.numel() else z
    log_p = over - over.exp().sum(-1, keepdim=True).log()
    sharp = wt * -log_p.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    smooth = torch.where(live, (w * -log_p).sum(-1), 0) / z.shape[-1]
    loss = (1 - label_smoothing) * sharp + z_loss * wt * torch.logsumexp(z, -1) ** 2
    loss = loss + label_smoothing * smooth if label_smoothing else loss
    if reduction == "none":
        return loss
    return loss.sum() / wt.sum() if reduction == "mean" else loss.sum()


# Term by term, with roundings that `Rounded` draws again.
OF_TERMS = {"cross_entropy": loss_of_terms, "linear_cross_entropy": product_of_terms}


def compare(call: Call, ours: dict | Exception, backend: str) -> None:
    """Asserts that `ours` is as accurate as the reference in the inputs' dtype.

    Of a row that is ignored nothing is computed, where torch's gradient of a NaN is one.
    """
    exactly, eager, exact = evaluated(call, ours, REFERENCES[call.op])
    narrow = call.arguments["input"].dtype in (torch.float16, torch.bfloat16)

    def rounded(key: str) -> Iterator[torch.Tensor]:
        for seed in range(4):
            with Rounded(torch.float32, seed):
                yield results(OF_TERMS[call.op], call, exactly)[key]
            if narrow:
                with Redrawn(seed):
                    yield results(REFERENCES[call.op], call)[key].double()

    assert_as_good(ours, eager, exact, rounded)


# What the fuzz has found, and what it draws too rarely.
EXAMPLES = {
    "a loss past float32": Call(
        "cross_entropy",
        {
            "input": Drawn((1, 1), values="huge"),
            "target": Targets((1,), torch.int64),
            "z_loss": 1e-3,
        },
    ),
    "an infinite weight of the target": Call(
        "linear_cross_entropy",
        {
            "input": Drawn((2, 1)),
            "linear_weight": Drawn((2, 1), values="one inf"),
            "target": Targets((2,), torch.int64, classes=2),
        },
        frozenset({"input"}),
    ),
    "scaled logits, rounded in one place alone": Call(
        "linear_cross_entropy",
        {
            "input": Drawn((1, 1)),
            "linear_weight": Drawn((2, 1), values="large constant"),
            "target": Targets((1,), torch.int64, classes=2),
            "scale": 0.1,
        },
        frozenset({"input"}),
    ),
}


def run(call: Call, backend: str) -> dict | Exception:
    """Returns the result or the error, which for a target may be torch's IndexError."""
    try:
        return ours(call, backend)
    except IndexError as error:
        return error


def refused(call: Call, error: Exception) -> None:
    """Asserts that an error is clear, or torch's own, where its lines run."""
    assert "out of bounds" in str(error) or says_what_is_wrong(call, str(error)), error


FUZZ = Fuzz(
    calls=calls,
    backends={op: [name for name in backends(op) if name not in SLOW] for op in OPS},
    compare=compare,
    run=run,
    mistakes=lambda op: broken(calls(op, 512), wrong_values),
    judge=right_or_refused(compare, refused),
    examples=EXAMPLES,
    example_backends=backends("cross_entropy"),
)
