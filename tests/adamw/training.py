"""Training runs that AdamW tests compare, with equal gradients for all optimizers."""

import copy
import io

import torch

from fusedops.optim import AdamW

FORMATS = ["float32", "bfloat16", "int8"]
SHAPES = [(5000,), (33, 7), (4096,), (1,), (0,), (64, 80), ()]


def parameters(dtype=torch.float32, shapes=SHAPES):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]


def gradients(params, seed):
    draw = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=draw).to(p.device, p.dtype)


def train(optimizer, steps=5, first=1):
    params = params_of(optimizer)
    for i in range(first, first + steps):
        gradients(params, i)
        optimizer.step()
    return params


def assert_close(params, others, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(params, others, rtol=rtol, atol=atol)


def equal_states(a, b):
    for (p, first), (q, second) in zip(a.state.items(), b.state.items(), strict=True):
        assert torch.equal(p, q)
        assert first.keys() == second.keys()
        assert all(first[k].dtype == second[k].dtype for k in first)
        assert all(torch.equal(first[k], second[k]) for k in first)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


def resumed(kind, optimizer, state_dict=None, **options):
    """Returns a new optimizer over copies of the parameters, which has loaded the state dict."""
    restored = kind([p.detach().clone().requires_grad_() for p in params_of(optimizer)], **options)
    restored.load_state_dict(state_dict or copy.deepcopy(optimizer.state_dict()))
    return restored


def assert_goes_on_alike(a, b, **first):
    train(a, **first)
    train(b, **first)
    equal_states(a, b)


def as_torchs(trained):
    """Makes a test: the function of a kind of AdamW gives the parameters that torch's gives."""

    def test(**params):
        assert_close(trained(AdamW, **params), trained(torch.optim.AdamW, **params))

    return test
