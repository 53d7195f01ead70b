"""measure_memory: a live step's bytes equal a count by hand."""

import gc
import math
from itertools import pairwise

import pytest
import torch
from children import forked
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops.measuring.memory import measure_memory
from fusedops.measuring.memory.allocations import Allocation, peak_of
from fusedops.profiling.collect.replay import function_call
from profiling.cases import BATCH, LENGTH, VOCABULARY, model_of, tokens, training_step

ROWS, FLOAT = 32, 4
SIZES = 64, 256, 128, 8


class Net(nn.Module):
    """Three linears with a ReLU between them, of SIZES."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in pairwise(SIZES))
        self.register_buffer("scale", torch.ones(SIZES[0]))

    def forward(self, x):
        first, *rest = self.layers
        x = first(x * self.scale)
        for layer in rest:
            x = layer(torch.relu(x))
        return x


def step_of(net, optimizer, x):
    def step():
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_memory_that_is_freed_when_more_is_allocated_is_not_in_the_peak():
    assert peak_of([Allocation(10, 0, 5), Allocation(8, 5, 9)]) == (0, 10)


def test_a_known_net_to_the_byte():
    """Saved: the first linear's input, each ReLU's result, and nothing of the sum."""
    net, x = Net(), torch.randn(ROWS, SIZES[0])
    optimizer = torch.optim.AdamW(net.parameters())
    step = step_of(net, optimizer, x)
    step()
    use = measure_memory(step, model=net, optimizer=optimizer)
    count = sum(k * n + n for k, n in pairwise(SIZES))
    assert use.parameters == use.gradients == FLOAT * count
    assert use.optimizer_state == 2 * FLOAT * count + 6 * FLOAT  # six tensors have a step each
    assert use.buffers == FLOAT * SIZES[0]
    assert use.inputs == x.nbytes
    relus, scaled = FLOAT * ROWS * (SIZES[1] + SIZES[2]), FLOAT * ROWS * SIZES[0]
    assert use.modules == {"": relus, "layers.0": scaled}
    assert use.activations == sum(use.modules.values())
    assert use.logits == FLOAT * ROWS * SIZES[-1]
    assert (use.frozen, use.kv_cache) == (0, 0)
    assert sum(use.at_peak.values()) == use.peak
    assert use.temporaries == use.at_peak["temporaries"]


def test_the_peak_is_in_the_optimizer():
    """Then parameters, gradients and state are alive, two temporaries of the largest weight, and
    one of the bias that was stepped before it.
    """
    net, x = Net(), torch.randn(1, SIZES[0])
    optimizer = torch.optim.AdamW(net.parameters())
    step = step_of(net, optimizer, x)
    step()
    use = measure_memory(step, model=net, optimizer=optimizer)
    assert use.at_peak["gradients"] == use.gradients
    assert use.at_peak["activations"] == 0
    weight, bias = FLOAT * SIZES[1] * SIZES[2], FLOAT * SIZES[1]
    assert use.temporaries == pytest.approx(2 * weight + bias, abs=64)  # and scalars


def test_memory_inside_of_an_operator_is_seen():
    """Convolution by unfolding makes a matrix that no Python code sees."""
    x = torch.randn(1, 4, 64, 64)
    matrix = FLOAT * 4 * 9 * 62 * 62
    weight = torch.randn(2, 4, 3, 3)
    use = measure_memory(lambda: torch._C._nn.slow_conv_dilated2d(x, weight, (3, 3), None))
    assert use.temporaries >= matrix


def test_frozen_parameters_have_no_gradients():
    net = Net()
    net.layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    use = measure_memory(step_of(net, optimizer, torch.randn(4, SIZES[0])), model=net)
    assert use.frozen == FLOAT * (SIZES[0] * SIZES[1] + SIZES[1])
    assert use.gradients == use.parameters - use.frozen


def test_shared_storages_count_once():
    net = Net()
    net.tied = net.layers[1]
    net.register_buffer("view", net.scale[:2])
    use = measure_memory(lambda: None, model=net)
    assert use.parameters == FLOAT * sum(k * n + n for k, n in pairwise(SIZES))
    assert use.buffers == FLOAT * SIZES[0]


def test_gradients_that_stay_from_the_step_before():
    net, x = Net(), torch.randn(4, SIZES[0])
    net(x).sum().backward()
    use = measure_memory(lambda: net(x).sum().backward(), model=net)
    assert use.gradients == use.parameters == use.at_peak["gradients"]


def test_checkpointing_saves_activations():
    net, x = Net(), torch.randn(ROWS, SIZES[0])
    plain = measure_memory(lambda: net(x).sum().backward(), model=net)
    net.zero_grad()
    again = measure_memory(
        lambda: checkpoint(net, x, use_reentrant=False).sum().backward(), model=net
    )
    assert again.activations == 0 < plain.activations  # the input is an input


def test_nothing_is_changed():
    """The same step with and without the hooks gives the same bits."""

    def trained(measure):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(ROWS, SIZES[0])
        optimizer = torch.optim.AdamW(net.parameters())
        step = step_of(net, optimizer, x)
        measure(step, net, optimizer)
        step()
        return [*net.parameters()], net

    plain, _ = trained(lambda step, *_: step())
    watched, net = trained(lambda step, net, o: measure_memory(step, model=net, optimizer=o))
    assert all(map(torch.equal, plain, watched))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    assert not any(hooks)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_a_step_that_raises_leaves_no_hooks():
    net = Net()
    with pytest.raises(ZeroDivisionError):
        measure_memory(lambda: 1 / 0, model=net)
    assert not any(m._forward_hooks for m in net.modules())
    x = torch.randn(1, SIZES[0])
    measure_memory(lambda: net(x).sum().backward(), model=net)  # and none of saved tensors


def memory_bytes(call, net):
    return measure_memory(call, model=net)


def saved_bytes(call, net):
    return function_call(call, (), {}).saved_bytes(patched=False)


@pytest.mark.parametrize("watched", [memory_bytes, saved_bytes])
def test_a_forward_whose_backward_never_runs_is_freed(watched):
    """A tanh saves its own result: kept with its graph, that would hold itself."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    for i in range(23):
        watched(lambda: net(x), net)
        if i == 2:
            before = live_tensors()
    assert live_tensors() == before


def live_tensors():
    gc.collect()
    return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())


def test_a_patched_model_stays_patched_under_the_hooks():
    """patch replaces no norm that has hooks; the loss makes no logits."""
    model = model_of("llama")
    fusedops.patch(model)
    optimizer = fusedops.optim.AdamW8bit(model.parameters())
    ids = tokens()
    step = training_step(model, optimizer, ids)
    step()
    use = measure_memory(step, model=model, optimizer=optimizer)
    assert use.logits == 0
    assert use.activations < 40 << 20
    assert use.optimizer_state == state_bytes_8bit(model)


def state_bytes_8bit(model):
    """Two codes an element, two scales for 256 of them, float32 below 4096 elements, the step."""
    sizes = [p.numel() for p in model.parameters()]
    small = sum(8 * n for n in sizes if n < 4096)
    return small + sum(2 * n + 8 * math.ceil(n / 256) for n in sizes if n >= 4096) + 4 * len(sizes)


def test_logits_and_what_the_loss_saves():
    model = model_of("llama")
    ids = tokens()

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    assert measure_memory(step, model=model).logits == 2 * FLOAT * BATCH * LENGTH * VOCABULARY


def test_slack_is_what_the_process_holds_beside():
    extra = torch.ones(64 << 20, dtype=torch.uint8)
    with_it = measure_memory(lambda: None).slack
    del extra
    without = measure_memory(lambda: None).slack
    assert 50 << 20 < with_it - without < 80 << 20


def test_table_and_dictionary():
    use = measure_memory(lambda: None, model=Net())
    assert str(use).splitlines()[0] == "memory of a step"
    assert use.to_dict()["parameters"] == use.parameters
    assert f"{use.parameters / 2**20:,.2f}" in str(use)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": 3}, "step must be a function without arguments, got int"),
        ({"model": "net"}, r"model must be a torch.nn.Module or None, got str"),
        ({"optimizer": []}, r"optimizer must be a torch.optim.Optimizer or None, got list"),
    ],
)
def test_bad_arguments(given, message):
    step = given.pop("step", lambda: None)
    with pytest.raises(TypeError, match=f"measure_memory: {message}"):
        measure_memory(step, **given)


def test_a_model_elsewhere_is_refused():
    net = nn.Linear(2, 2, device="meta")
    with pytest.raises(
        RuntimeError, match=r"measure_memory: model must be on the CPU, got .* meta"
    ):
        measure_memory(lambda: None, model=net)


def test_torchs_warning_of_older_blocks_is_not_seen():
    """It comes once in a process, so in one that has not measured before."""
    lines = """
import torch
from fusedops.measuring.memory import measure_memory
older = [torch.zeros(1000)]
measure_memory(older.clear)
"""
    done = forked("-c", lines).result()
    assert done.returncode == 0 and done.stderr == ""
