"""AdamW saves state dicts, and loads its own, torch's and bitsandbytes'."""

import copy
import math
import pickle

import pytest
import torch
from axes import grid

from adamw.training import (
    FORMATS,
    assert_close,
    assert_goes_on_alike,
    equal_states,
    parameters,
    params_of,
    resumed,
    through_a_file,
    train,
)
from fusedops.optim import AdamW, AdamW8bit
from fusedops.optim.adamw.state import wide_moments


def test_ours_goes_on_in_torch():
    ours, theirs = AdamW(parameters()), torch.optim.AdamW(parameters())
    train(ours), train(theirs)
    later = resumed(torch.optim.AdamW, ours)
    assert_close(train(later, first=6), train(theirs, first=6))


@pytest.mark.parametrize("state_dtype", FORMATS)
def test_torch_goes_on_in_ours(state_dtype):
    theirs = torch.optim.AdamW(parameters(), amsgrad=True)
    train(theirs)
    later = resumed(AdamW, theirs, amsgrad=True, state_dtype=state_dtype)
    assert later.param_groups[0]["state_dtype"] == state_dtype
    tolerance = {"float32": 1e-6, "bfloat16": 5e-4, "int8": 5e-3}[state_dtype]
    assert_close(train(later, first=6), train(theirs, first=6), atol=tolerance)


@grid(
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    state_dtype=FORMATS,
    route=["itself", "saved", "pickled", "copied"],
)
def test_goes_on_with_the_same_bits(dtype, state_dtype, route):
    options = {"state_dtype": state_dtype, "seed": 5}
    if dtype == torch.bfloat16:
        options["master_weights"] = "remainder"
    optimizer = AdamW(parameters(dtype), **options)
    train(optimizer)
    if route in ("pickled", "copied"):
        through = copy.deepcopy if route == "copied" else lambda o: pickle.loads(pickle.dumps(o))
        later = through(optimizer)
    else:
        saved = through_a_file(optimizer.state_dict()) if route == "saved" else None
        later = resumed(AdamW, optimizer, saved, **options)
    equal_states(optimizer, later)
    assert_goes_on_alike(optimizer, later, first=6)


def test_the_seed_is_in_the_state_dict():
    optimizer = AdamW(parameters(torch.bfloat16), seed=5)
    train(optimizer)
    later = resumed(AdamW, optimizer)
    assert later.param_groups[0]["seed"] == 5
    assert_goes_on_alike(optimizer, later, first=6)


def test_torch_state_dict_of_8_bits():
    ours, theirs = AdamW8bit(parameters()), torch.optim.AdamW(parameters())
    train(ours), train(theirs)
    exported = ours.torch_state_dict()
    assert set(exported["param_groups"][0]) == set(theirs.state_dict()["param_groups"][0])
    for i, state in theirs.state_dict()["state"].items():
        assert exported["state"][i].keys() == state.keys()
    later = resumed(torch.optim.AdamW, ours, exported)
    assert_close(train(later, first=6), train(theirs, first=6), atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_what_has_no_kernel_keeps_its_dtype(dtype):
    optimizer = AdamW8bit(parameters(dtype, [(50,)]))
    train(optimizer)
    for states in (optimizer.state_dict(), optimizer.torch_state_dict()):
        assert states["state"][0]["exp_avg"].dtype == dtype
        later = resumed(AdamW8bit, optimizer, copy.deepcopy(states))
        assert later.state_dict()["state"][0]["exp_avg"].dtype == dtype
        train(later)


def test_entries_of_others_stay():
    optimizer = AdamW8bit(parameters())
    p = train(optimizer)[0]
    optimizer.state[p]["mine"] = 1.5
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[p]["mine"] == 1.5


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_moment_that_is_not_finite_spoils_no_block(name):
    theirs = torch.optim.AdamW(parameters(shapes=[(5000,)]))
    (p,) = train(theirs)
    theirs.state[p][name][300] = math.inf
    ours = AdamW8bit(parameters(shapes=[(5000,)]))
    ours.load_state_dict(theirs.state_dict())
    (p,) = params_of(ours)
    m, v = wide_moments(ours.state[p], p)
    assert m[300] == 0 and v[300] == v.min()
    train(ours)
    assert p.isfinite().all() and all(t.isfinite().all() for t in ours.state[p].values())


def test_a_group_has_its_own_format_and_bytes():
    """Embeddings in float32 beside 8-bit states: 8 bytes an element, and 2.03."""

    def made():
        embedding, other = parameters(shapes=[(1000, 64), (256, 300)])
        groups = [{"params": [other]}, {"params": [embedding], "state_dtype": "float32"}]
        return AdamW8bit(groups, lr=1e-2)

    def bytes_of(p):
        return sum(t.nbytes for name, t in optimizer.state[p].items() if name != "step")

    optimizer = made()
    other, embedding = train(optimizer)
    blocks = other.numel() // 256
    assert bytes_of(other) == 2 * other.numel() + 2 * 4 * blocks
    assert bytes_of(embedding) == 8 * embedding.numel()

    later = made()
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["state_dtype"] for group in later.param_groups] == ["int8", "float32"]
    for p, copied in zip(params_of(optimizer), params_of(later), strict=True):
        assert all(torch.equal(t, later.state[copied][n]) for n, t in optimizer.state[p].items())


CONVERTED = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "bfloat16": (torch.bfloat16, {"state_dtype": "bfloat16"}),
    "remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "offload": (torch.float16, {"offload": "cpu"}),
    "float64": (torch.float64, {"amsgrad": True}),
}
NUMBERS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def converted(optimizer, dtype):
    """Does what `model.to(dtype)` does."""
    for p in params_of(optimizer):
        grad, p.grad = p.grad, None
        p.data = p.data.to(dtype)
        p.grad = None if grad is None else grad.to(dtype)


@grid(of=list(CONVERTED), dtype=NUMBERS)
def test_a_model_that_changes_its_dtype_goes_on_as_a_new_optimizer_would(of, dtype):
    """There, and back again. A state's format follows the parameter's dtype."""
    first, options = CONVERTED[of]
    optimizer = AdamW(parameters(first), **options)
    train(optimizer, 3)
    for number, to in enumerate((dtype, first)):
        converted(optimizer, to)
        assert_goes_on_alike(
            optimizer, resumed(AdamW, optimizer, **options), steps=2, first=4 + 2 * number
        )


def test_gradients_of_a_model_that_changes_its_dtype_are_used():
    optimizer = AdamW(parameters())
    train(optimizer, 3)
    converted(optimizer, torch.float64)
    other = resumed(AdamW, optimizer)
    for p, q in zip(params_of(optimizer), params_of(other), strict=True):
        q.grad = p.grad.clone()
    optimizer.step(), other.step()
    equal_states(optimizer, other)
