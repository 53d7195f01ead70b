"""Loaded AdamW states with overlapping or strided tensors step like clean copies."""

import copy

import pytest
import torch

from adamw.corrupted import entry, optimizer_of, with_a_state
from adamw.training import assert_goes_on_alike, equal_states, params_of, train
from fusedops.optim.adamw.memory import Claims


def with_gaps(t):
    return torch.stack([t, t], -1)[..., 0]


def negative(t):
    """Returns t with the negative bit set."""
    lazy = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert lazy.is_neg()
    return lazy


def conjugate(t):
    """Returns t with the conjugate bit set."""
    assert t.conj().resolve_conj().conj().is_conj()
    return t.conj().resolve_conj().conj()


def expanded(t):
    return t.reshape(-1)[:1].abs().expand(t.numel()).view(t.shape)


def windows(t):
    """Returns overlapping rows."""
    return torch.rand(t.numel()).as_strided(t.shape, (t.shape[1] // 2, 1))


def shared(parameter, name, other):
    """Makes two entries of a state the same tensor."""

    def change(state_dict):
        state = state_dict["state"][parameter]
        state[other] = state[name] = state[name].abs()

    return change


def overlapping(state_dict):
    """Puts two moments into one buffer, where they share 100 elements."""
    buffer = torch.rand(9900)
    state_dict["state"][0] |= {"exp_avg": buffer[4900:], "exp_avg_sq": buffer[:5000]}


def shared_step(state_dict):
    for i in (1, 2):
        state_dict["state"][i]["step"] = state_dict["state"][0]["step"]


def shared_by_parameters(state_dict):
    """Makes one tensor the state of two parameters, in different shapes."""
    for name in ("exp_avg", "exp_avg_sq"):
        first = state_dict["state"][0][name]
        state_dict["state"][1][name] = first[:231].view(33, 7)


LOADS = {
    "scales with gaps": ("int8", entry(0, "exp_avg_scale", with_gaps)),
    "expanded scales": ("int8", entry(0, "exp_avg_sq_scale", expanded)),
    "codes with gaps": ("int8", entry(2, "exp_avg", with_gaps)),
    "negative step": ("float32", entry(2, "step", negative)),
    "torch's own step: negative": ("float64", entry(0, "exp_avg", negative)),
    "negative exp_avg": ("float32", entry(0, "exp_avg", negative)),
    "negative maximum": ("float32", entry(2, "max_exp_avg_sq", negative)),
    "expanded exp_avg": ("float32", entry(0, "exp_avg", expanded)),
    "expanded maximum": ("int8", entry(2, "max_exp_avg_sq", expanded)),
    "overlapping rows": ("float32", entry(2, "exp_avg_sq", windows)),
    "torch's own step: expanded": ("float64", entry(0, "exp_avg_sq", expanded)),
    "torch's own step: conjugate": ("complex", entry(2, "exp_avg", conjugate)),
    "both moments": ("float32", shared(0, "exp_avg_sq", "exp_avg")),
    "torch's own step: both moments": ("float64", shared(0, "exp_avg_sq", "exp_avg")),
    "moments that overlap": ("float32", overlapping),
    "the step of three parameters": ("int8", shared_step),
    "moments of two parameters": ("float32", shared_by_parameters),
}


def clean(value):
    """Returns a copy in which each tensor is contiguous and has its own memory."""
    if isinstance(value, torch.Tensor):
        return value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("of", LOADS)
def test_a_load_steps_as_from_a_clean_copy(of):
    kind, change = LOADS[of]
    (optimizer, state_dict), other = with_a_state(kind), optimizer_of(kind)
    change(state_dict)
    copied = clean(state_dict)
    other.load_state_dict(copied)
    optimizer.load_state_dict(state_dict)
    assert_goes_on_alike(optimizer, other, steps=3, first=4)
    assert all(p.isfinite().all() for p in params_of(optimizer))


def test_a_parameter_in_its_own_state():
    """The step writes to both."""
    optimizer, other = optimizer_of("float32"), optimizer_of("float32")
    states = [copy.deepcopy(o.state_dict()) for o in (optimizer, other)]
    states[0]["state"][0]["exp_avg"] = params_of(optimizer)[0].detach()
    states[1]["state"][0]["exp_avg"] = params_of(other)[0].detach().clone()
    for each, state_dict in zip((optimizer, other), states, strict=True):
        each.load_state_dict(state_dict)
        train(each, 2, first=4)
    equal_states(optimizer, other)


@pytest.mark.parametrize("kind", ["float32", "int8", "float64"])
def test_sound_tensors_are_kept_as_torch_keeps_them(kind):
    """Views of one file's buffer too: copies would double a load's memory."""
    optimizer, state_dict = with_a_state(kind)
    first, last = (state_dict["state"][i] for i in (0, 2))
    buffer = torch.cat([last["exp_avg"].view(-1), first["exp_avg"]])
    first["exp_avg"], last["exp_avg"] = buffer[8192:], buffer[:8192].view(16, 512)
    optimizer.load_state_dict(state_dict)
    for i, p in enumerate(params_of(optimizer)):
        for name, t in optimizer.state[p].items():
            assert t.data_ptr() == state_dict["state"][i][name].data_ptr(), (i, name)


def test_claims_find_each_overlap():
    buffer = torch.zeros(100)
    claims = Claims()
    assert claims.claim(buffer[20:40]) and claims.claim(buffer[60:80])
    assert claims.claim(buffer[40:60]) and claims.claim(buffer[:20])
    assert not any(claims.claim(t) for t in (buffer, buffer[79:81], buffer[19:21], buffer[30:31]))
    assert not claims.claim(buffer[5:100:30]) and not claims.claim(buffer.view(10, 10)[:, 3])
    assert claims.claim(buffer[80:]) and claims.claim(buffer[:0]) and claims.claim(buffer[:0])
    assert claims.claim(torch.zeros(3, device="meta")) and claims.claim(buffer.to_sparse())
