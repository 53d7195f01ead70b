"""AdamW refuses bad state dicts: the error names the entry, and nothing changes."""

import copy
import math

import pytest
import torch
from axes import grid

from adamw.corrupted import CORRUPTED, entry, optimizer_of, with_a_state
from adamw.training import (
    FORMATS,
    assert_close,
    assert_goes_on_alike,
    parameters,
    params_of,
    train,
)
from fusedops.optim import AdamW
from fusedops.optim.adamw.state import SCALES, wide_moments


def bits(state_dict):
    """Returns a state dict's content in a form that == compares bit by bit."""
    if isinstance(state_dict, torch.Tensor):
        t = state_dict.detach().contiguous()
        return t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8).tolist())
    if isinstance(state_dict, dict):
        return {key: bits(value) for key, value in state_dict.items()}
    return [bits(v) for v in state_dict] if isinstance(state_dict, list | tuple) else state_dict


def everything(optimizer):
    """Returns the optimizer's state dict, parameters, hooks and object identities."""
    hooks = {name: list(value) for name, value in vars(optimizer).items() if "hooks" in name}
    objects = [id(optimizer.state), id(optimizer.param_groups), *map(id, optimizer.param_groups)]
    objects += [id(t) for state in optimizer.state.values() for t in state.values()]
    params = [p.detach().clone() for p in params_of(optimizer)]
    return bits(optimizer.state_dict()), bits(params), hooks, objects


def refused(optimizer, state_dict, match, error=ValueError):
    """Asserts that a load raises and changes nothing, and that training goes on as it would."""
    other = copy.deepcopy(optimizer)
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(state_dict)
    assert everything(optimizer) == before
    assert_goes_on_alike(optimizer, other, steps=2, first=4)


@pytest.mark.parametrize("of", CORRUPTED)
def test_a_corrupted_state_dict_changes_nothing(of):
    kind, corrupt, match = CORRUPTED[of]
    optimizer, state_dict = with_a_state(kind)
    corrupt(state_dict)
    given = bits_of_what_has_some(state_dict)
    refused(optimizer, state_dict, f"AdamW: load_state_dict: .*{match}")
    assert bits_of_what_has_some(state_dict) == given  # nor does it change what it was given


def bits_of_what_has_some(value):
    """Like `bits`, for a state dict that may contain any objects."""
    if isinstance(value, dict):
        return {key: bits_of_what_has_some(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits_of_what_has_some(item) for item in value]
    tensor = isinstance(value, torch.Tensor)
    strange = tensor and (value.is_meta or value.is_sparse or value.is_nested)
    return repr(value if strange else bits(value))


def test_a_parameter_without_a_name_is_said_by_its_number():
    optimizer, state_dict = with_a_state("int8", named=False)
    entry(2, "exp_avg_sq", lambda t: t[:8])(state_dict)
    match = r"AdamW: load_state_dict: parameter 2: exp_avg_sq must be uint8 \[16, 512\], got uint8"
    refused(optimizer, state_dict, match)


OF_TORCH = {
    "no groups": (lambda s: s.update(param_groups=[]), ValueError, "number of parameter groups"),
    "a parameter more": (
        lambda s: s["param_groups"][0]["params"].append(7),
        ValueError,
        "doesn't match the size of optimizer's group",
    ),
    "no states": (lambda s: s.pop("state"), KeyError, "state"),
}


@pytest.mark.parametrize("of", OF_TORCH)
def test_what_torch_refuses_is_refused_in_its_words(of):
    corrupt, error, match = OF_TORCH[of]
    optimizer, state_dict = with_a_state("int8")
    corrupt(state_dict)
    refused(optimizer, state_dict, match, error)
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    with pytest.raises(error) as torch_error:
        theirs.load_state_dict(state_dict)
    with pytest.raises(error) as our_error:
        optimizer.load_state_dict(state_dict)
    assert str(our_error.value) == str(torch_error.value)


def test_a_hook_that_raises_changes_nothing():
    optimizer = optimizer_of("int8")

    def raises(*_):
        raise RuntimeError("from a hook")

    optimizer.register_load_state_dict_pre_hook(raises)
    refused(optimizer, optimizer_of("float32").state_dict(), "from a hook", RuntimeError)


ACCEPTED = [
    {"lr": torch.tensor(1e-2), "fused": True},
    {"lr": 0, "eps": torch.tensor(1e-6), "weight_decay": 1},
    {"betas": (torch.tensor(0.8), torch.tensor(0.9)), "foreach": False},
    {"amsgrad": 1, "maximize": 0},
    {"amsgrad": True, "maximize": True, "foreach": True},
    {"foreach": None, "fused": None, "capturable": None, "differentiable": None},
]


@grid(kind=["float32", "float64"], options=ACCEPTED)
def test_options_that_torch_steps_with_are_loaded(options, kind):
    optimizer, theirs = optimizer_of(kind), optimizer_of(kind)
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in theirs.param_groups])
    state_dict = copy.deepcopy(optimizer.torch_state_dict())
    for group in state_dict["param_groups"]:
        group |= options
    theirs.load_state_dict(copy.deepcopy(state_dict))
    optimizer.load_state_dict(state_dict)
    train(optimizer, 2, first=4)
    train(theirs, 2, first=4)
    assert_close(params_of(optimizer), params_of(theirs))


def test_flags_that_an_old_state_dict_lacks_have_torchs_defaults():
    optimizer, state_dict = with_a_state("float32")
    names = ["amsgrad", "maximize", "foreach", "fused", "differentiable"]
    for group in state_dict["param_groups"]:
        for name in names:
            del group[name]
    optimizer.load_state_dict(state_dict)
    assert not any(group[name] for group in optimizer.param_groups for name in names)
    train(optimizer, 1, first=4)


def test_a_learning_rate_that_a_schedule_ended_below_0_is_loaded():
    """torch's LinearLR to 0 ends a rounding error below it."""
    theirs = torch.optim.AdamW([torch.ones(3, requires_grad=True)])
    schedule = torch.optim.lr_scheduler.LinearLR(theirs, 0.7, 0.0, total_iters=3)
    for _ in range(3):
        theirs.step()
        schedule.step()
    assert -1e-15 < theirs.param_groups[0]["lr"] < 0
    ours = AdamW([torch.ones(3, requires_grad=True)])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_codes_load_into_floats_with_their_scales():
    codes, state_dict = with_a_state("int8")
    for kind in ("float32", "bfloat16"):
        optimizer = optimizer_of(kind)
        optimizer.load_state_dict(state_dict)
        for p, q in zip(params_of(optimizer), params_of(codes), strict=True):
            actual, expected = wide_moments(optimizer.state[p], p), wide_moments(codes.state[q], q)
            torch.testing.assert_close(
                actual, expected, rtol=1e-2 if kind == "bfloat16" else 0, atol=0
            )


@grid(value=[math.nan, math.inf, -1.0, 1e30], name=SCALES, kind=FORMATS)
def test_a_block_with_a_bad_scale_restarts_from_zeros(kind, name, value):
    """1e30 is finite, but its fourth power is not."""
    if (name, value) == ("exp_avg_scale", 1e30):
        value = -math.inf
    (trained, state_dict), optimizer = with_a_state("int8"), optimizer_of(kind)
    for parameter, block in ((0, 3), (0, 19), (2, 5)):
        state_dict["state"][parameter][name].view(-1)[block] = value
    optimizer.load_state_dict(state_dict)
    for i, (p, q) in enumerate(zip(params_of(optimizer), params_of(trained), strict=True)):
        bad = {0: [*range(768, 1024), *range(4864, 5000)], 1: [], 2: [*range(1280, 1536)]}[i]
        state = {k: t.clone() for k, t in optimizer.state[p].items()}
        both = wide_moments(state, p), wide_moments(trained.state[q], q)
        for actual, expected in zip(*both, strict=True):
            expected.view(-1)[bad] = 0
            tolerance = 1e-2 if kind == "bfloat16" else 0
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
        if kind == "int8" and i != 1:
            good = torch.ones(p.numel(), dtype=torch.bool).index_fill(0, torch.tensor(bad), False)
            for moment in ("exp_avg", "exp_avg_sq"):
                loaded_codes, other = (s[moment].view(-1)[good] for s in (state, trained.state[q]))
                assert torch.equal(loaded_codes, other)
    train(optimizer, 3, first=4)
    assert all(p.isfinite().all() for p in params_of(optimizer))


@grid(kind=FORMATS, name=["absmax1", "absmax2"])
def test_a_block_of_bitsandbytes_with_a_bad_scale_restarts_from_zeros(name, kind):
    optimizer = optimizer_of(kind)
    state = {"step": 3}
    for i in "12":
        codes = torch.arange(5000) % 255 + 1
        state |= {f"state{i}": codes.byte(), f"qmap{i}": torch.linspace(0, 1, 256)}
        state[f"absmax{i}"] = torch.ones(20)
    state[name][2] = math.nan
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0] = state
    optimizer.load_state_dict(state_dict)
    p = params_of(optimizer)[0]
    for moment in wide_moments(optimizer.state[p], p):
        assert torch.equal(moment == 0, (torch.arange(5000) // 256) == 2)
    train(optimizer, 1, first=4)
    assert p.isfinite().all()


def old_gradients(params):
    """p.data of another dtype, and gradients from before."""
    for p in params:
        grad, p.grad = p.grad, None
        p.data = p.data.double()
        with torch.no_grad():
            p.grad = torch.empty_like(p)
            p.grad.data = grad


def on_meta(params):
    for p in params:
        grad, p.grad = p.grad, None
        torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().to("meta")))
        p.grad = grad.to("meta")


@grid(change=[old_gradients, on_meta], state_dtype=FORMATS, max_grad_norm=[None, 1.0])
def test_a_step_that_cannot_be_made_changes_nothing(change, state_dtype, max_grad_norm):
    """Also where some parameters could be stepped."""
    optimizer = AdamW(parameters(), state_dtype=state_dtype, max_grad_norm=max_grad_norm)
    params = train(optimizer, 3)
    change(params[2:])
    before = bits(optimizer.state_dict()["state"]), [p.detach().clone() for p in params]
    asked = {
        old_gradients: r"gradient of parameter 2 must be float64 .*, got float32 .*; call zero",
        on_meta: r"parameter 2 must be on cpu like its state, got .* on meta; move the model back",
    }
    with pytest.raises(RuntimeError, match=f"^AdamW: step: .*{asked[change]}"):
        optimizer.step()
    assert bits(optimizer.state_dict()["state"]) == before[0]
    assert all(p.is_meta or torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
