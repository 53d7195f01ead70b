"""move_to_huge_pages moves weights and keeps their values, strides and ties."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from fusedops.huge_pages import move_to_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="Linux gives no huge pages"
)


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1024, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1024))
    net.register_buffer("steps", torch.arange(7))
    return net


@has_pages
def test_values_stay_and_tensors_move():
    net = model()
    kept = copy.deepcopy(net.state_dict())
    before = {name: (t, t.data_ptr()) for name, t in net.state_dict(keep_vars=True).items()}
    assert move_to_huge_pages(net) == "8 of 8 MB of weights are in huge pages"
    assert min(t.data_ptr() for t in net.state_dict().values()) % 2**21 == 0  # a page's first byte
    for name, t in net.state_dict(keep_vars=True).items():
        same, address = before[name]
        assert t is same
        assert t.data_ptr() != address
        assert t.data_ptr() % 64 == 0
        assert t.untyped_storage().nbytes() == t.nbytes
        assert torch.equal(t, kept[name])


def test_gradients_and_steps_reach_moved_weights():
    net, other = model(), model()
    move_to_huge_pages(net)
    for m in (net, other):
        steps = torch.optim.SGD(m.parameters(), 0.1)
        m(torch.ones(2, 1024)).square().sum().backward()
        steps.step()
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_twice_and_a_copy():
    net = model()
    kept = copy.deepcopy(net.state_dict())
    move_to_huge_pages(net)
    another = copy.deepcopy(net)
    move_to_huge_pages(net)
    del net
    for name, t in another.state_dict().items():
        assert torch.equal(t, kept[name])


def test_ties_and_strides_stay():
    net = nn.Module()
    weight = nn.Parameter(torch.randn(1000, 1024).t())
    net.a, net.b = nn.Linear(1000, 1024), nn.Linear(1000, 1024)
    net.a.weight = net.b.weight = weight
    net.register_buffer("alias", weight.detach())
    strides, kept = weight.stride(), weight.detach().clone()
    move_to_huge_pages(net)
    assert net.a.weight is net.b.weight is weight
    assert weight.stride() == strides
    assert torch.equal(weight, kept)
    assert net.alias.data_ptr() == weight.data_ptr()


class Subclass(torch.Tensor):
    pass


def overlapping():
    whole = torch.randn(1024, 1024)
    return whole, whole[:512], whole[3:9], torch.randn(2000, 512)[:, :300]


def shared():
    return (torch.randn(1024, 1024).share_memory_(),)


def inference():
    with torch.inference_mode():
        return (torch.ones(1024, 1024),)


def subclass_tensor():
    return (torch.randn(1024, 1024).as_subclass(Subclass),)


@pytest.mark.parametrize("make", [overlapping, shared, inference, subclass_tensor])
def test_what_must_not_move_stays(make):
    net = model()
    for number, t in enumerate(make()):
        net.register_buffer(f"held_{number}", t)
    before = {n: t.data_ptr() for n, t in net.named_buffers() if n.startswith("held")}
    moved = net[0].weight.data_ptr()
    move_to_huge_pages(net)
    assert net[0].weight.data_ptr() != moved
    assert {n: net.get_buffer(n).data_ptr() for n in before} == before


def test_few_or_no_weights():
    net = nn.Linear(4, 4)
    address = net.weight.data_ptr()
    assert move_to_huge_pages(net) == "weights of less than 2 MiB stay where they are"
    assert net.weight.data_ptr() == address
    assert "stay" in move_to_huge_pages(nn.Linear(1024, 1024, device="meta"))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_the_memory_goes_with_the_weights():
    def resident() -> int:
        text = Path("/proc/self/smaps_rollup").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))

    net = nn.Linear(4096, 4096, bias=False)
    move_to_huge_pages(net)
    held = resident()
    del net
    assert held - resident() > 60 * 1024  # of 64 MiB
