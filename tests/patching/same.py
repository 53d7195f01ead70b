"""Compares a module before and after patch: outputs, gradients, and the bits after unpatch."""

import copy

import torch

from fusedops.patching import patch, unpatch
from fusedops.testing import yardstick
from patching.quiet import quietly


def results(model, x, *more):
    """Returns the output, and the gradients of x and of every parameter; None for an unused one."""
    x = x.clone().requires_grad_()
    y = model(x * 1, *more)
    leaves = [x, *model.parameters()]
    return y.detach(), *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)


def assert_same(model, x, **kinds):
    """Asserts that patching changes no result, and that unpatch restores every bit."""
    eager, exact = results(model, x), results(copy.deepcopy(model).double(), x.double())
    report = quietly(patch, model, **kinds)
    for got, *others in zip(results(model, x), eager, exact, strict=True):
        assert (got is None) == (others[0] is None)
        complaint = None if got is None else yardstick(got, *others)
        assert complaint is None, complaint
    unpatch(model)
    for got, other in zip(results(model, x), eager, strict=True):
        assert got is other is None or torch.equal(got, other)
    return report
