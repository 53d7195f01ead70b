"""AdamW loads bitsandbytes' and torchao's states, and its GPU benchmark cases run on a CPU.

States come from the packages, where they are installed, and from copies of their formats made by
hand. The packages' own code decodes their states. GPU benchmark rows run with the CPU's clock.
"""

from dataclasses import replace

import pytest
import torch
from axes import grid

from adamw.training import parameters, params_of, through_a_file, train
from benchmarks.harness.run import COPY, run_case
from benchmarks.harness.timing import CPU, Machine, wall
from benchmarks.operators.adamw import GPU_ROWS
from fusedops.optim import AdamW, AdamW8bit
from fusedops.optim.adamw.state import wide_moments

# 8 bits of blocks that end within one and at one, three dimensions, and what is kept whole.
SHAPES = [(5000,), (64, 80), (4, 8, 256), (33, 7), ()]


def loaded(kind, params, state_dict):
    optimizer = kind([p.detach().clone().requires_grad_() for p in params])
    optimizer.load_state_dict(state_dict)
    return optimizer


def assert_holds(optimizer, steps, moments):
    """moments: exp_avg and exp_avg_sq of each parameter, decoded. Our codes are a 64th apart."""
    for p, (m, v) in zip(params_of(optimizer), moments, strict=True):
        state = optimizer.state[p]
        assert state["step"].item() == steps
        coded = state["exp_avg"].dtype == torch.int8
        assert coded == (isinstance(optimizer, AdamW8bit) and p.numel() >= 4096)
        for actual, expected in zip(wide_moments(state, p), (m, v), strict=True):
            apart = expected.abs().max().item() / 64 if coded else 0
            expected = expected.reshape(actual.shape)
            torch.testing.assert_close(actual, expected, rtol=0, atol=apart)


def bitsandbytes_moments(state):
    """Decodes bitsandbytes' moments with bitsandbytes' own code."""
    functional = pytest.importorskip("bitsandbytes.functional")
    return [
        functional.dequantize_blockwise(
            state[f"state{i}"], absmax=state[f"absmax{i}"], code=state[f"qmap{i}"], blocksize=256
        )
        if state[f"state{i}"].dtype == torch.uint8
        else state[f"state{i}"].clone()
        for i in (1, 2)
    ]


@grid(
    kind=[AdamW, AdamW8bit],
    dtype=[torch.float32, torch.bfloat16],
    name=["AdamW8bit", "AdamW", "PagedAdamW8bit"],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_bitsandbytes_goes_on_in_ours(name, dtype, kind):
    peers = pytest.importorskip("bitsandbytes.optim")
    peer = getattr(peers, name)(parameters(dtype, SHAPES), lr=2e-3, betas=(0.8, 0.99))
    params = train(peer)
    moments = [bitsandbytes_moments(peer.state[p]) for p in params]
    ours = loaded(kind, params, through_a_file(peer.state_dict()))
    assert_holds(ours, 5, moments)
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"]) == (2e-3, (0.8, 0.99))
    train(ours)


@grid(
    kind=[AdamW, AdamW8bit],
    dtype=[torch.float32, torch.bfloat16],
    name=["AdamW8bit", "AdamW4bit", "AdamWFp8"],
)
def test_torchao_goes_on_in_ours(name, dtype, kind):
    peers = pytest.importorskip("torchao.optim")
    peer = getattr(peers, name)(parameters(dtype, SHAPES), lr=2e-3)
    params = train(peer)
    moments = [
        [
            t.dequantize() if hasattr(t, "codes") else t.float().clone()
            for t in (peer.state[p]["exp_avg"], peer.state[p]["exp_avg_sq"])
        ]
        for p in params
    ]
    assert hasattr(peer.state[params[1]]["exp_avg"], "codes")
    ours = loaded(kind, params, through_a_file(peer.state_dict()))
    assert_holds(ours, 5, moments)
    assert ours.param_groups[0]["lr"].item() == pytest.approx(2e-3)  # a tensor there
    train(ours)


def test_sharded_torchao_goes_on_in_ours():
    peers = pytest.importorskip("torchao.optim")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        whole = parameters(shapes=[(64, 256)])[0].detach()
        p = torch.distributed.tensor.distribute_tensor(
            whole, mesh, [torch.distributed.tensor.Shard(0)]
        ).requires_grad_()
        p.grad = p.detach().clone()
        peer = peers.AdamW8bit([p])
        peer.step()
        moments = [peer.state[p][n].to_local().dequantize() for n in ("exp_avg", "exp_avg_sq")]
        for kind in (AdamW, AdamW8bit):
            ours = loaded(kind, [p], peer.state_dict())
            assert_holds(ours, 1, [moments])
            assert ours.state[params_of(ours)[0]]["exp_avg"].placements == p.placements
    finally:
        torch.distributed.destroy_process_group()


def codes(n, seed):
    return torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).byte()


def by_hand(n=5000, block=256):
    """Returns both moments' codes, map and block maxima, and the decoded values."""
    maps = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
    largest = [torch.rand(-(-n // block)) + 0.5 for _ in maps]
    coded_moments = [codes(n, seed) for seed in (1, 2)]
    spread = [t.repeat_interleave(block)[:n] for t in largest]
    values = [m[c.long()] * s for m, c, s in zip(maps, coded_moments, spread, strict=True)]
    return coded_moments, maps, largest, values


@grid(
    kind=[AdamW, AdamW8bit],
    block=[256, 2048],
    hidden=[True, False],
    dtype=[torch.float32, torch.float16],
)
def test_state_as_bitsandbytes_writes_it(dtype, hidden, block, kind):
    coded_moments, maps, largest, values = by_hand(block=block)
    state = {}
    for i, (c, m, s) in enumerate(zip(coded_moments, maps, largest, strict=True), start=1):
        state |= {f"state{i}": c, f"qmap{i}": m, f"absmax{i}": s}
    state = {"__bnb_optimizer_quant_state__": state} if hidden else state
    p = parameters(dtype, shapes=[(5000,)])
    saved = kind(p).state_dict() | {"state": {0: state | {"step": 12}}}
    assert_holds(loaded(kind, p, saved), 12, [values])


class Coded(torch.Tensor):
    """Like torchao's states: looks like a float, and no torch operator works on it."""

    @staticmethod
    def __new__(cls, codes, scale, qmap):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale, qmap):
        self.codes, self.scale, self.qmap = codes, scale, qmap

    def dequantize(self):
        values = self.qmap[self.codes.long()].view(len(self.scale), -1)
        return (values * self.scale[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


@grid(kind=[AdamW, AdamW8bit], dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_state_as_torchao_writes_it(dtype, kind):
    coded_moments, maps, largest, values = by_hand(5120)
    coded = [Coded(*three) for three in zip(coded_moments, largest, maps, strict=True)]
    state = {"step": torch.tensor(12.0), "exp_avg": coded[0], "exp_avg_sq": coded[1]}
    p = parameters(dtype, [(5120,)])
    ours = loaded(kind, p, kind(p).state_dict() | {"state": {0: state}})
    if dtype == torch.float64:  # which torch's own step takes
        assert torch.equal(ours.state[params_of(ours)[0]]["exp_avg"], values[0].double())
    else:
        assert_holds(ours, 12, [values])
    train(ours)


DRY = Machine(CPU.device, dict.fromkeys(("device", "host"), wall))
MOVED = {  # bytes for a parameter
    ("adamw float32", torch.float32): 28,
    ("adamw int8", torch.float32): 16.0625,
    ("adamw int8", torch.bfloat16): 10.0625,
    ("adamw float32 clipped", torch.float32): 32,
    ("adamw int8 clipped", torch.float32): 20.0625,
    ("adamw int8 clipped", torch.bfloat16): 12.0625,
}


ROWS = {(row.operation.name, row.dtype, row.clock): row for row in GPU_ROWS}


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.title)
def test_row_of_a_gpu_runs_small_on_a_cpu(row):
    large = row.clock == "device"
    small = replace(row, shape=(1, 1 << 20) if large else (3, 4096))
    result = run_case(small, 0.02, DRY, copy=large)
    assert not result.refused and not result.inexact
    timed = {name for name in result.seconds if name not in ("bitsandbytes", "torchao")}
    assert timed == {"torch fused", "fusedops"} | ({COPY} if large else set())
    elements = small.shape[0] * small.shape[1]
    assert result.bytes_moved == elements * MOVED[row.operation.name, row.dtype]
