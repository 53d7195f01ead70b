"""Random AdamW steps match the reference, and torch's optimizer."""

import math

import pytest
import torch
from contract.fuzzing import LAYOUTS, SIZES
from hypothesis import given
from hypothesis import strategies as st

from adamw.cases import check, step_of
from fusedops.optim import AdamW
from fusedops.references.adamw import NEAREST, REMAINDER, STOCHASTIC
from fusedops.testing import backends

# Views that no two elements share.
APART = [name for name in LAYOUTS if "expanded" not in name and name != "overlapping"]
BACKENDS = [name for name in backends("adamw_step") if name != "reference"]
ROUNDINGS = {
    torch.float32: [NEAREST],
    torch.float16: [NEAREST, STOCHASTIC],
    torch.bfloat16: [NEAREST, STOCHASTIC, REMAINDER],
}


def shapes(most: int = 6) -> st.SearchStrategy[list[tuple[int, ...]]]:
    size = st.integers(1, 9) | st.sampled_from([s for s in SIZES if s < 5000])
    shape = st.tuples(size) | st.tuples(st.integers(1, 9), size)
    shape |= st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
    return st.lists(shape, min_size=1, max_size=most)


def laid_out(name: str):
    """Returns a tensor's values in another memory layout."""

    def layout(t: torch.Tensor) -> torch.Tensor:
        if t.dim() == 0 or t.numel() == 0:
            return t
        view = LAYOUTS[name](lambda shape: torch.zeros(shape, dtype=t.dtype), tuple(t.shape))
        return view.copy_(t)

    return layout


@st.composite
def steps(draw: st.DrawFn, backend: str):
    """Draws the operator's arguments in the middle of a training."""
    dtype = draw(st.sampled_from(list(ROUNDINGS)))
    step = step_of(
        draw(shapes()),
        dtype,
        draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        draw(st.sampled_from(ROUNDINGS[dtype])),
        taken=draw(st.sampled_from([0, 1, 7, 1000, 10**6])),
        layout=laid_out(draw(st.sampled_from(["contiguous", *APART]))),
        by_rows=draw(st.booleans()),
        backend=backend,
        lr=draw(st.sampled_from([1e-3, 1e-1, 0.0, 1.0])),
        beta1=draw(st.sampled_from([0.9, 0.0, 0.999])),
        beta2=draw(st.sampled_from([0.999, 0.95, 0.0])),
        eps=draw(st.sampled_from([1e-8, 1e-3, 0.0])),
        weight_decay=draw(st.sampled_from([0.01, 0.0, 1.0])),
        maximize=draw(st.sampled_from([0.0, 1.0])),
        amsgrad=draw(st.sampled_from([0.0, 1.0])),
    )
    for g in step.grads:
        size = draw(st.sampled_from([1.0, 1.0, 1e-3, 1e3]))
        g.mul_(size)
        if g.numel() and draw(st.integers(0, 9)) == 0:
            bad = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
            g[tuple(draw(st.integers(0, n - 1)) for n in g.shape)] = bad
    if draw(st.booleans()):
        scale = draw(st.sampled_from([1.0, 2.0**16, 0.5]))
        step.more["grad_scale"] = torch.tensor(scale, device=step.params[0].device)
        for g in step.grads:
            g.mul_(scale if g.dtype != torch.float16 else 1.0)
    return step


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_as_the_reference(backend, data):
    check(data.draw(steps(backend)), backend, redrawn=4)


@given(data=st.data())
def test_as_torchs(data):
    """Both train alike, with gradients that come and go, options and groups that change."""
    sizes = data.draw(shapes(4))
    options = {
        "lr": data.draw(st.sampled_from([1e-3, 1e-1])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1])),
        "amsgrad": data.draw(st.booleans()),
        "maximize": data.draw(st.booleans()),
        "eps": data.draw(st.sampled_from([1e-8, 1e-3])),
    }
    later = data.draw(st.sampled_from([{}, {"lr": 0.3}, {"betas": (0.5, 0.9)}, {"maximize": True}]))
    absent = [data.draw(st.sets(st.integers(0, len(sizes) - 1))) for _ in range(4)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float32, torch.float64]))
    stored = data.draw(st.booleans())

    def trained(kind: type) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in sizes]
        optimizer = kind([{"params": params[:1]}, {"params": params[1:]}][: len(sizes)], **options)
        for i, without in enumerate(absent):
            for k, p in enumerate(params):
                p.grad = None if k in without else torch.randn(p.shape, dtype=dtype)
            optimizer.step()
            if i == 1:
                optimizer.param_groups[0] |= later
            if i == 2 and stored:
                states = optimizer.state_dict()
                optimizer = kind(optimizer.param_groups)
                optimizer.load_state_dict(states)
        return params

    torch.testing.assert_close(trained(AdamW), trained(torch.optim.AdamW), rtol=2e-5, atol=2e-6)
