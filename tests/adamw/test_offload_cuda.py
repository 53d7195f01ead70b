"""AdamW offloading tests that need a GPU: synchronization, memory, GradScaler, CUDA graphs."""

import copy

import torch

from adamw.training import gradients, parameters, params_of
from fusedops.optim import AdamW, AdamW8bit


def test_the_device_is_not_waited_for():
    """Another stream is busy before, during and after a step."""
    params = [p.detach().cuda().requires_grad_() for p in parameters(shapes=[(3000, 4000)] * 3)]
    optimizer = AdamW8bit(params, offload="cpu", max_grad_norm=1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(4_000_000_000)  # two seconds
        done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().synchronize()
    assert not done.query()


def test_the_gpu_has_no_states():
    params = [torch.zeros(4000, 4000, device="cuda", requires_grad=True) for _ in range(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    before = torch.cuda.memory_allocated()
    optimizer = AdamW(params, offload="cpu")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < params[0].nbytes


def test_work_behind_a_step_sees_its_weights():
    """The host does not wait, and gradients are still being written."""
    baseline = AdamW(parameters(shapes=[(2000, 3000), (5000,)]))
    ours = AdamW([p.detach().cuda().requires_grad_() for p in params_of(baseline)], offload="cpu")
    seen = []
    for i in range(4):
        gradients(params_of(baseline), i)
        torch.cuda._sleep(50_000_000)
        for p, q in zip(params_of(ours), params_of(baseline), strict=True):
            p.grad = q.grad.pin_memory().to("cuda", non_blocking=True)
        ours.step(), baseline.step()
        seen += [p.detach() + 0 for p in params_of(ours)]
        ours.zero_grad()
        last = [q.detach().clone() for q in params_of(baseline)]
        assert all(torch.equal(p.cpu(), q) for p, q in zip(seen[-2:], last, strict=True))
