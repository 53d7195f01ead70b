"""The profiler's table of operators: bytes, reuse distances, arithmetic, shapes and modules."""

import pytest
import torch

import fusedops
from fusedops.profiling.collect.operators import table


def operators(call):
    """Operator -> its row, of a call without gradients."""
    with torch.no_grad():
        call()
        rows = table(call, 0.0, lambda: None).ops
    return {row.name: row for row in rows}


N, M = 64, 128
X, W, B, C = torch.randn(N, M), torch.randn(M, M), torch.randn(M), torch.randn(M)
INDEX = torch.randint(N, (5,))
TARGET = torch.randint(M, (N,))
OUT = torch.empty(N, M)
F = 4  # bytes of a float32

CASES = {
    "aten::add": (lambda: X + X[0], N * M * 2 + M),
    "aten::mul_": (lambda: OUT.mul_(X), N * M * 3),
    "aten::copy_": (lambda: OUT.copy_(X), N * M * 2),
    "aten::fill_": (lambda: OUT.fill_(1.0), N * M),
    "aten::mm": (lambda: X @ W, N * M * 2 + M * M),
    "aten::addmm": (lambda: torch.addmm(B, X, W), N * M * 2 + M * M + M),
    "aten::sum": (lambda: X.sum(0), N * M + M),
    "aten::embedding": (lambda: torch.embedding(X, INDEX), 5 * M * 2 + 5 * 2),
    "aten::gather": (lambda: X.gather(0, INDEX[:, None].expand(5, 3)), 5 * 3 * 2 + 5 * 2),
    "fusedops::norm_forward": (  # the statistics are float64
        lambda: fusedops.functional.layer_norm(X, (M,), B, C),
        N * M * 2 + 2 * M + 2 * 2 * N,
    ),
    "fusedops::gated_activation_forward": (
        lambda: fusedops.functional.swiglu(X, OUT),
        N * M * 3,
    ),
    "fusedops::linear_cross_entropy_forward": (  # no logits: a loss and a sum of each row
        lambda: fusedops.functional.linear_cross_entropy(X, W, TARGET),
        N * M + M * M + 2 * N + 2 * N + 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes(name):
    call, elements = CASES[name]
    rows = operators(call)
    row = next(row for key, row in rows.items() if key.startswith(name))
    assert row.bytes == elements * F and row.calls == 1


def test_views_move_nothing():
    rows = operators(lambda: X.t().view(M, N)[1:].detach().unsqueeze(0))
    assert all(row.bytes == 0 for row in rows.values())


def test_an_expanded_tensor_counts_once():
    wide = torch.randn(2, M)[:1].expand(N, M)
    assert operators(lambda: wide.sum())["aten::sum"].bytes == (M + 1) * F


def test_what_a_kernel_reads_again_is_in_the_table():
    """Two blocks of 256 rows decode the codes twice, from the cache that holds all of them."""
    x = torch.randn(512, 256)
    weight = fusedops.functional.quantize_weight(torch.randn(M, 256), "int8")
    rows = operators(lambda: fusedops.functional.quantized_linear(x, weight))
    codes = M * 256 + M * F
    row = next(row for name, row in rows.items() if name.startswith("fusedops::quantized_linear"))
    assert row.bytes == 512 * (256 + M) * F + 2 * codes
    assert dict(row.traffic)[1 << (codes - 1).bit_length()] == codes


def test_fused_adamw_reads_and_writes_its_state():
    parameter = torch.nn.Parameter(torch.randn(4096))
    optimizer = fusedops.optim.AdamW([parameter])
    parameter.grad = torch.randn(4096)
    rows = operators(optimizer.step)
    row = next(row for name, row in rows.items() if name.startswith("fusedops::adamw"))
    read_and_written, read = 3, 1  # parameter and moments, gradient
    expected = 4096 * F * (2 * read_and_written + read)
    assert expected <= row.bytes <= expected + 64  # the step number, and the clipping's scale


def test_reuse_distances():
    """Two tensors of 1 MiB that are used in turn, and one of 1 KiB that is used at once."""
    big, other, small = torch.zeros(2**18), torch.zeros(2**18), torch.zeros(2**8)

    def call():
        for _ in range(4):
            big.add_(1.0)
            other.add_(1.0)
        for _ in range(4):
            small.mul_(2.0)

    rows = operators(call)
    assert {distance for distance, _ in rows["aten::add_"].traffic} == {2**22}
    near = dict(rows["aten::mul_"].traffic)
    assert near[2**11] == 3 * 2 * 2**10 and max(near) > 2**23  # but the first, a step ago


def test_matrix_shapes_and_modules_are_named():
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = Net()
    rows = table(lambda: net(torch.ones(2, 8)).sum().backward(), 0.0, lambda: None).ops
    products = [row for row in rows if row.name == "aten::addmm"]
    assert [(row.module, row.calls, row.flops) for row in products] == [
        ("layers.*", 3, 3 * 2 * 2 * 8 * 8)
    ]
    assert products[0].shapes == "[8] [2, 8] [8, 8]T" and products[0].dtype == "float32"
    backward = [row for row in rows if row.name == "aten::mm"]
    assert {row.module for row in backward} == {"layers.*"}
