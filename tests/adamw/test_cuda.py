"""AdamW tests that need a GPU: launches, graphs, devices, large tensors."""

import pytest
import torch
from axes import grid
from contract.cuda_graphs import capture, count_launches

from adamw.training import FORMATS, assert_close, gradients, parameters, train
from fusedops.optim import AdamW, AdamW8bit

SHAPES = [(5000,), (33, 7), (4096,), (1,), (64, 80), ()]


def on_the_gpu(dtype=torch.float32, shapes=SHAPES):
    return [p.detach().cuda().requires_grad_() for p in parameters(dtype, shapes)]


@grid("limit,launches", [(None, 1), (1.0, 2)], state_dtype=FORMATS)
def test_the_whole_model_is_one_launch_and_two_with_clipping(state_dtype, limit, launches):
    params = on_the_gpu(torch.bfloat16, [(64, 64)] * 448)
    optimizer = AdamW(params, state_dtype=state_dtype, max_grad_norm=limit)
    train(optimizer, 2)
    assert count_launches(optimizer.step) == launches


@grid(limit=[None, 1.0], state_dtype=FORMATS)
def test_graph_replays_what_eager_gives(state_dtype, limit):
    """The learning rate is a tensor that a scheduler changes between replays."""

    def make():
        lr = torch.tensor(1e-2, device="cuda")
        params = on_the_gpu(torch.bfloat16)
        options = {"state_dtype": state_dtype, "max_grad_norm": limit, "capturable": True}
        optimizer = AdamW(params, lr=lr, **options)
        gradients(params, 1)
        return params, optimizer, lr

    def next_gradients(params, lr, i):
        drawn = [p.detach().clone() for p in params]
        gradients(drawn, i)
        for p, d in zip(params, drawn, strict=True):
            p.grad.copy_(d.grad)
        lr.mul_(0.5)

    captured, optimizer, lr = make()
    graph, _ = capture(optimizer.step)  # after a step of its own
    for i in (2, 3):
        next_gradients(captured, lr, i)
        graph.replay()
    eager, optimizer, lr = make()
    optimizer.step()
    for i in (2, 3):
        next_gradients(eager, lr, i)
        optimizer.step()
    assert all(map(torch.equal, captured, eager))


def test_parameters_in_several_places():
    """Parameters on a GPU and a CPU are clipped by their common norm."""

    def make(kind, **options):
        params = [*on_the_gpu(), *parameters()]
        optimizer = kind(params, lr=1e-2, **options)
        for i in range(3):
            gradients(params, i)
            if not options:
                torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=False)
            optimizer.step()
        return [p.cpu() for p in params]

    assert_close(make(AdamW, max_grad_norm=0.5), make(torch.optim.AdamW))


@pytest.mark.xdist_group("large")  # one at a time
def test_more_elements_than_int32_counts():
    numel = 2**31 + 1000
    need = 3 * numel * 6  # bytes: parameter, gradient and moments, other workers
    if torch.cuda.get_device_properties().total_memory < need:
        pytest.skip(f"needs a GPU with {need / 2**30:.0f} GiB of memory")
    torch.cuda.empty_cache()
    p = torch.ones(numel, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    p.grad = torch.full_like(p, 0.5)
    optimizer = AdamW8bit([p], lr=0.125, weight_decay=0.0)
    optimizer.step()
    state = optimizer.state[p]
    assert p.min() == p.max() == 0.875
    assert state["exp_avg"].min() == 127 and state["exp_avg_sq"].min() >= 254
