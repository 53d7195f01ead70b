"""AdamW behaves like torch.optim.AdamW, and its errors name wrong options."""

import math
import threading
import time
from collections import defaultdict

import pytest
import torch
from axes import grid
from torch import nn

import fusedops
from adamw.training import FORMATS, as_torchs, assert_close, gradients, parameters, train
from fusedops.optim import AdamW, AdamW8bit
from fusedops.testing import backends

CONFIGURATIONS = [
    {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.3},
    {"lr": torch.tensor(1e-2), "amsgrad": True},
    {"foreach": True, "maximize": True},
    {"fused": True, "betas": (torch.tensor(0.8), torch.tensor(0.9))},
]


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_as_the_original(options):
    ours, theirs = AdamW(parameters(), **options), torch.optim.AdamW(parameters(), **options)
    assert_close(train(ours), train(theirs))


@grid(state_dtype=FORMATS, name=[b for b in backends("adamw_step") if b != "cuda"])
def test_every_backend_trains_alike(name, state_dtype):
    theirs = train(torch.optim.AdamW(parameters()))
    with fusedops.backend(name):
        ours = train(AdamW(parameters(), state_dtype=state_dtype))
    assert_close(ours, theirs, atol={"float32": 1e-6, "bfloat16": 5e-4, "int8": 5e-3}[state_dtype])


@as_torchs
def test_group_options_and_a_scheduler(kind):
    a, b, c = parameters(shapes=[(500,), (20, 20), (7,)])
    optimizer = kind([{"params": [a], "lr": 0.1}, {"params": [b], "weight_decay": 0.5}])
    optimizer.add_param_group({"params": [c], "betas": (0.5, 0.6), "maximize": True})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    for i in range(5):
        train(optimizer, 1, i)
        scheduler.step()
    return [a, b, c]


def test_a_closure_is_called_with_gradients():
    p = parameters(shapes=[(10,)])[0]
    optimizer = AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert first.requires_grad and second < first


def test_no_gradients_at_all():
    optimizer = AdamW(parameters(), max_grad_norm=1.0)
    optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("change", ["cleared", "replaced", "one replaced", "one moment"])
def test_states_that_are_replaced_are_seen(change):
    def make(kind):
        optimizer = kind(parameters(shapes=[(500,), (30,)]))
        params = train(optimizer, 3)
        if change == "cleared":
            optimizer.state.clear()
        elif change == "replaced":
            optimizer.state = defaultdict(dict)
        elif change == "one moment":
            optimizer.state[params[0]]["exp_avg"] = torch.zeros(500)
        else:
            optimizer.state[params[0]] = {}
        return train(optimizer, 3), [optimizer.state[p]["step"].item() for p in params]

    (ours, steps), (theirs, torch_steps) = make(AdamW), make(torch.optim.AdamW)
    assert_close(ours, theirs)
    assert steps == torch_steps


@as_torchs
def test_tensors_that_are_swapped_are_followed(kind):
    optimizer = kind(parameters(shapes=[(50,)]))
    p = train(optimizer)[0]
    p.grad = None
    torch.utils.swap_tensors(p, nn.Parameter(torch.ones(50)))
    return train(optimizer)


def test_a_state_goes_between_the_kernels_and_torch():
    """Where an option that the kernels do not take comes and goes."""
    for state_dtype in FORMATS:
        optimizer = AdamW(parameters(torch.bfloat16), state_dtype=state_dtype)
        train(optimizer, 2)
        optimizer.param_groups[0]["differentiable"] = True
        train(optimizer, 1)
        optimizer.param_groups[0]["differentiable"] = False
        for p in train(optimizer, 1):
            stored_dtype = getattr(torch, state_dtype)
            small = torch.float32 if state_dtype == "int8" else stored_dtype
            assert optimizer.state[p]["exp_avg"].dtype in (stored_dtype, small)


@as_torchs
def test_a_parameter_that_moves_in_memory_is_seen(kind):
    optimizer = kind(parameters())
    for p in train(optimizer):
        p.data = p.data.clone()
    return train(optimizer)


def test_the_version_of_a_parameter_counts_up():
    p = parameters(shapes=[(10,)])[0]
    product = p * p
    p.grad = torch.ones(10)
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_strided_parameters(fused):
    def make(kind, **options):
        base = parameters(shapes=[(40, 60), (8, 6, 4), (30, 20, 2)])
        memory = [b.detach().clone() for b in base]
        views = [memory[0].t(), memory[1].permute(2, 0, 1), memory[2][..., 0]]
        params = [v.requires_grad_() for v in views]
        train(kind(params, **options))
        return params, memory

    theirs, _ = make(torch.optim.AdamW, foreach=False)
    ours, memory = make(AdamW, fused=fused)
    assert_close(ours, theirs)
    assert torch.equal(
        memory[2][..., 1], parameters(shapes=[(40, 60), (8, 6, 4), (30, 20, 2)])[2][..., 1]
    )


class TestWhatTheKernelsDoNotCover:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    def test_dtypes(self, dtype):
        def make(kind):
            params = parameters(shapes=[(50,), (3, 4)]) + parameters(dtype, shapes=[(20,)])
            return train(kind(params, lr=0.1))

        assert_close(make(AdamW), make(torch.optim.AdamW))

    def test_clipping_goes_over_all(self):
        def make(kind, **options):
            params = parameters(shapes=[(50,)]) + parameters(torch.float64, shapes=[(20,)])
            optimizer = kind(params, lr=0.1, **options)
            for i in range(4):
                gradients(params, i)
                if not options:
                    nn.utils.clip_grad_norm_(params, 0.5)
                optimizer.step()
            return params

        assert_close(make(AdamW, max_grad_norm=0.5), make(torch.optim.AdamW))

    @pytest.mark.parametrize("number", [math.inf, math.nan])
    def test_a_norm_that_is_not_finite_skips_the_step(self, number):
        (p,) = parameters(torch.float64, shapes=[(20,)])
        before, p.grad = p.detach().clone(), torch.ones_like(p)
        p.grad[3] = number
        AdamW([p], max_grad_norm=0.5).step()
        assert torch.equal(p, before)

    def test_a_dtype_that_changes(self):
        (p,) = parameters(torch.complex64, shapes=[(20,)])
        optimizer = AdamW([p])
        for dtype in (torch.complex64, torch.complex128):
            p.data, p.grad = p.data.to(dtype), None
            p.grad = torch.ones_like(p)
            optimizer.step()
            assert optimizer.state[p]["exp_avg"].dtype == dtype

    def test_clipping_counts_imaginary_parts(self):
        p = torch.zeros(8, dtype=torch.complex64).requires_grad_()
        p.grad = torch.full((8,), 3j)
        optimizer = AdamW([p], max_grad_norm=1.0)
        optimizer.step()
        expected = torch.full((8,), 0.1 * 1j / math.sqrt(8))
        torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected.to(torch.complex64))

    @pytest.mark.parametrize("state_dtype", FORMATS)
    def test_a_parameter_with_the_negative_bit(self, state_dtype):
        def make(kind, **options):
            p = torch.randn(5000, dtype=torch.complex64, generator=_seeded()).conj().imag
            assert p.is_neg() and p.is_leaf
            return train(kind([p.requires_grad_(), *parameters(shapes=[(50,)])], **options))

        theirs = make(torch.optim.AdamW)
        ours = make(AdamW, state_dtype=state_dtype, min_8bit_size=100)
        assert ours[0].is_neg()
        assert torch.equal(ours[0], theirs[0])

    def test_a_gradient_with_the_conjugate_bit(self):
        def make(resolved, **options):
            p = torch.randn(50, dtype=torch.complex64, generator=_seeded()).requires_grad_()
            grad = torch.randn(50, dtype=torch.complex64, generator=_seeded()).conj()
            assert grad.is_conj()
            p.grad = grad.resolve_conj() if resolved else grad
            kind = torch.optim.AdamW if resolved and not options else AdamW
            kind([p], lr=0.1, **options).step()
            return p

        assert torch.equal(make(False), make(True))
        clipped = {"max_grad_norm": 0.5}
        assert torch.equal(make(False, **clipped), make(True, **clipped))

    def test_sparse_gradients_are_refused_as_by_torch(self):
        p = parameters(shapes=[(10, 3)])[0]
        p.grad = torch.sparse_coo_tensor([[1]], [[1.0, 2.0, 3.0]], (10, 3))
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            AdamW([p]).step()

    def test_differentiable(self):
        def make(kind):
            p, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
            q = p.clone()
            q.grad = x * 2
            kind([q], differentiable=True, lr=0.1).step()
            return torch.autograd.grad(q.sum(), x)[0]

        torch.testing.assert_close(make(AdamW), make(torch.optim.AdamW))


def _seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"state_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", [b for b in backends("adamw_step") if b != "cuda"])
def test_a_gradient_with_the_negative_bit(name, options):
    def make(negative):
        params = parameters(shapes=[(5000,), (33, 7)])
        optimizer = AdamW(params, **options)
        for _ in range(3):
            for p in params:
                grad = torch.randn(p.shape, dtype=torch.complex64, generator=_seeded()).conj().imag
                assert grad.is_neg()
                p.grad = grad if negative else grad.resolve_neg()
            optimizer.step()
        return params

    with fusedops.backend(name):
        for ours, expected in zip(make(True), make(False), strict=True):
            assert torch.equal(ours, expected)


def test_other_threads_go_on_during_a_step():
    p = torch.zeros(1 << 22).requires_grad_()
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p])
    turns, done = [0], threading.Event()

    def count():
        while not done.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    thread.start()
    for _ in range(20):
        optimizer.step()
    done.set()
    thread.join()
    assert turns[0] > 200  # where a step keeps the interpreter to itself, one for each


def test_small_tensors_keep_float32():
    shapes = [(4095,), (4096,), (65, 64), (50,)]
    optimizer = AdamW8bit(parameters(shapes=shapes), min_8bit_size=4096)
    states = [optimizer.state[p]["exp_avg"].dtype for p in train(optimizer)]
    assert states == [torch.float32, torch.int8, torch.int8, torch.float32]


WRONG = [
    {"lr": -1.0},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, -0.1)},
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"lr": torch.ones(2)},
    {"fused": True, "foreach": True},
    {"fused": True, "differentiable": True},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_wrong_arguments_are_refused_in_torchs_words(options):
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        torch.optim.AdamW(parameters(), **options)
    with pytest.raises(type(theirs.value)) as ours:
        AdamW(parameters(), **options)
    assert str(ours.value) == str(theirs.value)


@grid(
    options=[
        {"state_dtype": "int4"},
        {"block_size": 128},
        {"min_8bit_size": -1},
        {"min_8bit_size": 1.5},
        {"stochastic_rounding": "yes"},
        {"master_weights": "float32"},
        {"max_grad_norm": 0},
        {"max_grad_norm": "1"},
        {"offload": "disk"},
        {"seed": -1},
        {"seed": 2**63},
    ]
)
def test_wrong_options_of_ours_are_named(options):
    name, value = next(iter(options.items()))
    for args, more in ((parameters(), options), ([{"params": parameters(), **options}], {})):
        with pytest.raises(ValueError, match=rf"AdamW: {name} must be .*, got {value!r}"):
            AdamW(args, **more)


@pytest.mark.parametrize("options", [{"seed": 1}, {"max_grad_norm": 0.5}], ids=str)
def test_what_is_of_all_groups_is_the_same_in_each(options):
    with pytest.raises(ValueError, match="must be the same in all groups"):
        AdamW([{"params": parameters(), **options}])


def test_it_is_one_of_torchs():
    optimizer = AdamW8bit(parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW8bit"
    assert optimizer.defaults["lr"] == 1e-3
    assert "state_dtype: int8" in repr(optimizer)
