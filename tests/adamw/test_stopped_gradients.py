"""8-bit moments of elements whose gradient stops, beside others whose gradient goes on."""

import copy

import torch
from axes import grid
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


BACKENDS = [name for name in backends("adamw_step") if name != "cpu"]
USUAL = (0.9, 0.999)
# backend, spread, betas, and the steps after which elements have stopped and stay where they are
RUNS = [("cpu", spread, USUAL, [200, 1000, 10_000]) for spread in SPREADS]
RUNS += [(backend, spread, USUAL, [200, 260]) for backend in BACKENDS for spread in SPREADS]
RUNS += [("cpu", 0, betas, [1500, 3000]) for betas in [(0.5, 0.9), (0.95, 0.95), (0.99, 0.999)]]


@grid("backend,spread,betas,steps", RUNS)
def test_elements_stop_where_their_gradient_does(backend, spread, betas, steps):
    size = 4096 if backend == "cpu" else 1024
    options = {"lr": LR, "betas": betas, "weight_decay": 0.0}
    p, exact = nn.Parameter(torch.zeros(size, device=device_of(backend))), torch.zeros(size)
    exact.requires_grad_()
    optimizer = fusedops.optim.AdamW8bit([p], min_8bit_size=0, **options)
    with fusedops.backend(backend):
        moved = displacement(optimizer, p, spread, steps)
    last = min(steps[1], 1500)
    (limit,) = displacement(torch.optim.AdamW([exact], **options), exact, spread, [last])
    assert moved[0].max() <= 1.5 * limit.max()
    assert all(torch.equal(moved[0], later) for later in moved[1:]), "it goes on growing"


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
    (torchs_group,) = ours.torch_state_dict()["param_groups"]
    assert torchs_group.keys() == torchs.state_dict()["param_groups"][0].keys()
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
