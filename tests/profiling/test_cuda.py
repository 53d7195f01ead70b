"""fusedops.profile on a CUDA device. test_gpu.py and test_gpu_live.py need no device."""

import pytest
import torch
from torch import nn

import fusedops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


def trained(model, batch, loss=lambda out: out.square().mean(), **options):
    """The report of a training step with AdamW, on batches that are on the GPU."""
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    data = [torch.randn(*batch, device="cuda") for _ in range(2)] * 40
    return fusedops.profile(step, data=data, model=model, optimizer=optimizer, **options)


def test_large_products_are_compute():
    report = trained(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))), (8192, 4096))
    assert report.verdict.bounds == ("compute",), report
    assert report.evidence.gpu.busy > 0.8


def test_small_operators_are_launches():
    report = trained(nn.Sequential(*(nn.Linear(16, 16) for _ in range(60))), (8, 16))
    assert report.verdict.bounds == ("launch",), report
    assert report.evidence.gpu.busy < 0.6 and report.evidence.gpu.host_waits < 0.05


def test_a_wait_is_named_by_its_line():
    def loss(out):
        scale = out.abs().max().item()
        return (out / scale).square().mean()

    report = trained(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))), (4096, 2048), loss)
    line = loss.__code__.co_firstlineno + 1
    assert f"test_cuda.py:{line}" in [sync.where for sync in report.evidence.gpu.syncs], report
    assert torch.cuda.get_sync_debug_mode() == 0


def test_what_was_collected_and_put_back():
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    before = [p.detach().clone() for p in model.parameters()]
    report = trained(model, (1024, 512))
    evidence = report.evidence
    assert all(map(torch.equal, before, model.parameters()))
    size = sum(p.nbytes for p in model.parameters())
    assert evidence.memory["parameters"] == evidence.memory["gradients"] == size
    assert evidence.memory["optimizer_state"] == 2 * size  # the steps are on the CPU
    assert evidence.memory["peak"] > 4 * size and evidence.memory["slack"] >= 0
    assert evidence.flops["float32"] == 2 * 1024 * 512 * 2048 * 5  # no gradient of the input
    assert evidence.ceilings.copy and evidence.ceilings.flops["bfloat16"] > 1e12
    for on_gpu, wall in zip(evidence.plain.on_gpu, evidence.plain.seconds, strict=True):
        assert 0 < on_gpu <= 1.05 * wall
    busy = sum(row.seconds for row in report.ops)
    assert busy == pytest.approx(evidence.gpu.busy * report.time.seconds, rel=0.2)
    assert sum(share[1] for share in report.verdict.shares.values()) == pytest.approx(1)
    print(report)
