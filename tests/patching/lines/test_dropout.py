"""patch fuses a dropout before a sum, or leaves it in place."""

import copy

import pytest
import torch

from fusedops.patching import patch
from patching.lines.residual_cases import (
    DROPOUT,
    DropoutStillNeeded,
    ModuleDropout,
    N,
    TwoCalls,
    build,
    close,
    residual_sites,
)


@pytest.mark.parametrize("kind", DROPOUT, ids=lambda kind: kind.__name__)
def test_dropout_goes_into_the_sum(kind, sums):
    """The mask is not torch's, but has its share and scale, and the seed reproduces it."""
    model = build(kind, p=0.5)
    model[0].flag = False
    model[0].mix.weight.data.zero_()
    model[0].mix.bias.data.fill_(1.0)
    report = patch(model)
    assert "draws its own mask" in residual_sites(report.fused)[0].reason
    x = torch.zeros(64, N)
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    *_, p = sums.call_args.args
    assert p == 0.5
    model.eval()
    model(x)
    assert sums.call_args.args[-1] == 0.0


@pytest.mark.parametrize("kind", [TwoCalls, DropoutStillNeeded])
def test_dropout_that_stays_where_it_is(kind, sums):
    model = build(kind)
    unpatched = copy.deepcopy(model)
    patch(model)
    x = torch.randn(4, N)
    torch.manual_seed(3)
    got = model(x)
    torch.manual_seed(3)
    close([got], [unpatched(x)])
    assert sums.call_args.args[-1] == 0.0


def test_dropout_that_is_not_torchs_is_called(sums):
    """A dropout with a hook, or of a subclass, is still called."""
    model = build(ModuleDropout)
    patch(model)
    seen = []
    model[0].dropout.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randn(4, N))
    assert seen == [1]
    assert sums.call_args.args[-1] == 0.0
