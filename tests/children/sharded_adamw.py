"""Child script of tests/adamw/test_sharded.py: checks AdamW under FSDP2, DDP and ZeRO.

`python -m children.sharded_adamw RANK RANKS FILE CASES FOLDER` in tests/ is one rank's process.
"""

import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from children.ranks import group
from fusedops.optim import AdamW, AdamW8bit


def model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 96), nn.Tanh(), nn.Linear(96, 130), nn.LayerNorm(130))
    return layers.to(dtype)


def sharded(dtype=torch.float32) -> nn.Module:
    net = model(dtype)
    fully_shard(net[0])
    fully_shard(net)
    return net


def train(net: nn.Module, optimizer, steps: int, first: int = 0, max_norm=None) -> None:
    """The same batch on every rank, so that sharded and whole models get the same gradients."""
    dtype = next(net.parameters()).dtype
    for i in range(first, first + steps):
        draw = torch.Generator().manual_seed(i)
        x, y = (torch.randn(8, n, generator=draw).to(dtype) for n in (256, 130))
        optimizer.zero_grad()
        (net(x) - y).float().square().mean().backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()


def full(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_alike(ours: nn.Module, theirs: nn.Module, atol: float = 1e-6) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(full(p), full(q), rtol=1e-5, atol=atol)


def fsdp(folder: Path) -> None:
    """float32 states: as torch's AdamW of the same shards."""
    ours, theirs = sharded(), sharded()
    train(ours, AdamW(ours.parameters(), lr=1e-2), 5)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 5)
    assert_alike(ours, theirs)


def fsdp_8bit(folder: Path) -> None:
    """Near what it is over the whole model, whose scales have the same shapes."""
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = sharded(dtype), model(dtype)
        first, second = (
            AdamW8bit(ours.parameters(), lr=1e-3),
            AdamW8bit(theirs.parameters(), lr=1e-3),
        )
        train(ours, first, 3)
        train(theirs, second, 3)
        p, q = next(ours.parameters()), next(theirs.parameters())
        assert p.grad.to_local().dtype == dtype
        assert isinstance(first.state[p]["exp_avg"], DTensor)
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
            assert first.state[p][name].shape == second.state[q][name].shape
        if dtype == torch.float32:  # a row of 96 is a block of the one and a part of the other
            for p, q, start in zip(
                *map(nn.Module.parameters, (ours, theirs, model())), strict=True
            ):
                assert (full(p) - q).norm() < 0.05 * (q - start).norm()
        else:
            assert_alike(ours, theirs, atol=2e-2)


def clipping(folder: Path) -> None:
    """The norm is that of all ranks' gradients."""
    ours, theirs = sharded(), sharded()
    train(ours, AdamW(ours.parameters(), lr=1e-2, max_grad_norm=0.05), 4)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 4, max_norm=0.05)
    assert_alike(ours, theirs)


def save(folder: Path) -> None:
    net = sharded()
    optimizer = AdamW8bit(net.parameters(), lr=1e-2, min_8bit_size=1000)
    train(net, optimizer, 3)
    states, optim_states = get_state_dict(net, optimizer)
    dcp.save({"model": states, "optim": optim_states}, checkpoint_id=folder / "checkpoint")
    whole = {f"{i}": full(v) for i, v in enumerate(_moments(optimizer))}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "moments.pt")


def load(folder: Path) -> None:
    """On another number of ranks: the same bits, and the training goes on."""
    net = sharded()
    optimizer = AdamW8bit(net.parameters(), lr=1e-2, min_8bit_size=1000)
    states, optim_states = get_state_dict(net, optimizer)
    dcp.load({"model": states, "optim": optim_states}, checkpoint_id=folder / "checkpoint")
    set_state_dict(net, optimizer, model_state_dict=states, optim_state_dict=optim_states)
    whole = torch.load(folder / "moments.pt")
    for i, moment in enumerate(_moments(optimizer)):
        assert moment.dtype == whole[f"{i}"].dtype
        assert torch.equal(full(moment), whole[f"{i}"])
    train(net, optimizer, 2, first=3)


def _moments(optimizer) -> list[torch.Tensor]:
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state[p][n] for p in params for n in names if n in optimizer.state[p]]


def specs(folder: Path) -> None:
    """No step leaves a DTensorSpec behind."""
    net = sharded()
    optimizer = AdamW8bit(net.parameters(), max_grad_norm=1.0)
    train(net, optimizer, 3)
    counts = []
    for _ in range(2):
        for _ in range(500):
            optimizer.step()
        gc.collect()
        counts.append(sum(isinstance(o, DTensorSpec) for o in gc.get_objects()))
    assert counts[0] == counts[1], counts


def ddp(folder: Path) -> None:
    """Replicas that get the same gradients keep the same bits, rounded by chance as they are."""
    net = model(torch.bfloat16)
    wrapped = nn.parallel.DistributedDataParallel(net)
    optimizer = AdamW8bit(net.parameters(), lr=1e-2)
    train(wrapped, optimizer, 5, first=100 * dist.get_rank())
    for p in net.parameters():
        others = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(others, p.detach())
        assert all(torch.equal(p, other) for other in others)


def zero(folder: Path) -> None:
    """ZeroRedundancyOptimizer over AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, theirs = model(), model()
    train(net, ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=1e-2), 4)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 4)
    assert_alike(net, theirs)


def copies(folder: Path) -> None:
    """A state dict of DTensors comes back with the same bits, and as torch's."""
    net = sharded()
    optimizer = AdamW8bit(net.parameters(), lr=1e-2, min_8bit_size=1000)
    train(net, optimizer, 3)
    before = [full(t).clone() for t in _moments(optimizer)]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(full(t), b) for t, b in zip(_moments(optimizer), before, strict=True))
    wide = optimizer.torch_state_dict()["state"][0]
    assert wide["exp_avg"].dtype == torch.float32
    assert wide["exp_avg"].shape == next(net.parameters()).shape
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.torch_state_dict())
    again = AdamW8bit(net.parameters(), lr=1e-2, min_8bit_size=1000)
    again.load_state_dict(theirs.state_dict())
    p = next(net.parameters())
    torch.testing.assert_close(
        full(again.state[p]["exp_avg"]).float(), before[0].float(), rtol=0, atol=1
    )


def plain(folder: Path) -> None:
    """A state dict of whole tensors: cut as the parameters are, and refused where one is wrong."""
    net = sharded()
    optimizer = AdamW8bit(net.parameters(), lr=1e-2, min_8bit_size=1000)
    train(net, optimizer, 3)
    before = [full(t).clone() for t in _moments(optimizer)]
    whole = optimizer.state_dict()
    whole |= {"state": {i: {k: full(v) for k, v in s.items()} for i, s in whole["state"].items()}}
    optimizer.load_state_dict(copy.deepcopy(whole))
    assert all(torch.equal(full(t), b) for t, b in zip(_moments(optimizer), before, strict=True))
    assert isinstance(next(iter(optimizer.state.values()))["exp_avg_scale"], DTensor)
    corruptions = (lambda t: t[:-1], lambda t: torch.nested.as_nested_tensor([*t.float()]))
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_scale"):
        for corrupt in corruptions:
            wrong = copy.deepcopy(whole)
            wrong["state"][0][name] = corrupt(wrong["state"][0][name])
            try:
                optimizer.load_state_dict(wrong)
            except ValueError as error:
                assert f"parameter 0: {name} must be" in str(error), error
            else:
                raise AssertionError(f"a truncated or nested {name} was loaded")
    assert all(torch.equal(full(t), b) for t, b in zip(_moments(optimizer), before, strict=True))
    bad = copy.deepcopy(whole)
    bad["state"][0]["exp_avg_sq_scale"][7] = torch.nan
    optimizer.load_state_dict(bad)
    m, v = (full(optimizer.state[next(net.parameters())][n]) for n in ("exp_avg", "exp_avg_sq"))
    others = torch.arange(len(m)) != 7
    assert not m[7].any() and not v[7].any()
    assert torch.equal(m[others], before[0][others]) and torch.equal(v[others], before[1][others])
    train(net, optimizer, 2, first=3)
    assert all(full(p).isfinite().all() for p in net.parameters())


def memory(folder: Path) -> None:
    """Parts of DTensors with gaps, negative, or of one memory step as from clean copies."""

    def negative(t):
        return torch.complex(torch.zeros_like(t), -t).conj().imag

    def gaps(t):
        return torch.stack([t, t], -1)[..., 0]

    def changed(state: dict, name: str, make) -> None:
        t = state[name]
        state[name] = DTensor(make(t.to_local()), t._spec, requires_grad=False)

    def trained(state_dtype: str, clean: bool) -> list[torch.Tensor]:
        net = sharded()
        optimizer = AdamW(net.parameters(), state_dtype=state_dtype, min_8bit_size=1000)
        train(net, optimizer, 2)
        state_dict = copy.deepcopy(optimizer.state_dict())
        for state in state_dict["state"].values():
            if state["exp_avg"].dtype == torch.int8:
                changed(state, "exp_avg_scale", torch.clone if clean else gaps)
                changed(state, "exp_avg_sq_scale", torch.clone if clean else negative)
            else:
                shared = state["exp_avg_sq"].to_local()
                changed(state, "exp_avg", lambda _, t=shared: t.clone() if clean else t)
        optimizer.load_state_dict(state_dict)
        train(net, optimizer, 2, first=2)
        return [*net.parameters(), *_moments(optimizer)]

    for state_dtype in ("float32", "int8"):
        for t, other in zip(trained(state_dtype, False), trained(state_dtype, True), strict=True):
            assert isinstance(t, DTensor) and torch.equal(full(t), full(other))


def main(rank: str, ranks: str, meeting: str, cases: str, folder: str) -> None:
    with group(rank, ranks, meeting):
        init_device_mesh("cpu", (int(ranks),))
        for case in cases.split(","):
            print(f"case {case}", flush=True)
            globals()[case](Path(folder))
            dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
