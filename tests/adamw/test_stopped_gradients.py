"""8-bit moments of elements whose gradient stops, beside others whose gradient goes on."""

import copy

import pytest
import torch
from torch import nn

import fusedops
from fusedops.testing import backends, device_of

LR = 1e-3
# gradients of one size, and of sizes 1 to 1e-6 in every block
SPREADS = [0, 6]


def displacement(optimizer, p, spread, steps):
    """How far the elements are, after each of `steps`, whose gradient stopped at step 10.

    p: zeros; half of its elements keep their gradient.
    """
    torch.manual_seed(0)
    grad = torch.randn(p.shape) * 10 ** (-spread * torch.rand(p.shape))
    grad = grad.to(p.device, p.dtype)
    moves, start = {}, p.detach().clone()
    for step in range(max(steps)):
        if step == 10:
            grad[::2] = 0
        p.grad = grad.clone()
        optimizer.step()
        if step + 1 in steps:
            moves[step + 1] = (p.detach() - start)[::2].abs()
    return [moves[step] for step in steps]


@pytest.mark.parametrize("spread", SPREADS)
def test_elements_stop_where_their_gradient_does(spread):
    steps = [200, 1000, 10_000]
    ours, torchs = (nn.Parameter(torch.zeros(4096)) for _ in range(2))
    optimizer = fusedops.optim.AdamW8bit([ours], lr=LR, weight_decay=0.0)
    exact = torch.optim.AdamW([torchs], lr=LR, weight_decay=0.0)
    moved = displacement(optimizer, ours, spread, steps)
    (limit,) = displacement(exact, torchs, spread, [1000])
    assert moved[0].max() <= 1.5 * limit.max()
    assert all(torch.equal(moved[0], later) for later in moved[1:]), "it goes on growing"


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("backend", [name for name in backends("adamw_step") if name != "cpu"])
def test_they_stop_on_every_backend(backend, spread):
    p = nn.Parameter(torch.zeros(1024, device=device_of(backend)))
    exact = nn.Parameter(torch.zeros(1024))
    optimizer = fusedops.optim.AdamW8bit([p], lr=LR, weight_decay=0.0, min_8bit_size=0)
    torchs = torch.optim.AdamW([exact], lr=LR, weight_decay=0.0)
    with fusedops.backend(backend):
        moved = displacement(optimizer, p, spread, [200, 260])
    (limit,) = displacement(torchs, exact, spread, [260])
    assert moved[0].max() <= 1.5 * limit.max()
    assert torch.equal(*moved)


@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.95, 0.95), (0.99, 0.999), (0.9, 0.99)])
def test_they_stop_with_other_betas(betas):
    steps = [1500, 3000]
    ours, torchs = (nn.Parameter(torch.zeros(4096)) for _ in range(2))
    optimizer = fusedops.optim.AdamW8bit([ours], lr=LR, betas=betas, weight_decay=0.0)
    exact = torch.optim.AdamW([torchs], lr=LR, betas=betas, weight_decay=0.0)
    moved = displacement(optimizer, ours, 0, steps)
    (limit,) = displacement(exact, torchs, 0, [1500])
    assert moved[0].max() <= 1.5 * limit.max()
    assert torch.equal(*moved)


def test_betas_that_change_move_as_torchs():
    """A warm-up of beta1: the bound of constant betas would shorten the steps."""
    params = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    grad = torch.randn(4096)
    ours = fusedops.optim.AdamW8bit(params[:1], lr=LR, weight_decay=0.0)
    torchs = torch.optim.AdamW(params[1:], lr=LR, weight_decay=0.0)
    for step in range(1, 21):
        for p, optimizer in zip(params, (ours, torchs), strict=True):
            optimizer.param_groups[0]["betas"] = (min(0.95, 0.5 + 0.05 * step), 0.999)
            p.grad = grad.clone()
            optimizer.step()
    sizes = [p.detach().abs().mean().item() for p in params]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02
    resumed = fusedops.optim.AdamW8bit([nn.Parameter(params[0].detach().clone())], lr=LR)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    resumed.param_groups[0]["params"][0].grad = grad.clone()
    resumed.step()
    ours.step()
    assert torch.equal(resumed.param_groups[0]["params"][0], params[0])
    for _ in range(300):
        ours.step()
    assert "steps_since_betas" not in ours.param_groups[0]


def test_weights_of_rare_words_stay_bounded():
    """A bag of words with Zipf's frequencies: most columns seldom have a gradient."""

    def largest_weight(make):
        torch.manual_seed(1)
        model = nn.Linear(2000, 64)
        optimizer = make(model.parameters())
        frequencies = 1 / torch.arange(1, 2001)
        truth = torch.randn(2000, 64)
        for _ in range(4000):
            words = torch.multinomial(frequencies, 16 * 20, replacement=True).view(16, 20)
            bags = torch.zeros(16, 2000).scatter_add_(1, words, torch.ones(16, 20))
            loss = nn.functional.cross_entropy(model(bags), (bags @ truth).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model.weight.abs().max().item()

    ours = largest_weight(lambda p: fusedops.optim.AdamW8bit(p, lr=LR))
    torchs = largest_weight(lambda p: torch.optim.AdamW(p, lr=LR))
    assert ours <= 1.2 * torchs
