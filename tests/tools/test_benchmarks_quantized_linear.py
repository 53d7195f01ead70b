"""The quantized_linear benchmarks alternate weights and refuse wrong results."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.harness.case import FORWARD, Case, Contender
from benchmarks.harness.run import run_case
from benchmarks.harness.timing import CPU
from benchmarks.operators import quantized_linear

BUDGET_S = 0.05
SHAPE = (8, 128, 64)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    monkeypatch.setattr(quantized_linear, "ROTATED", 3 * 128 * 64 * 4)  # three of eager's weight


def run(operation, mode=FORWARD, only=("eager", "fusedops")):
    return run_case(Case(operation, mode, torch.float32, SHAPE, only=only), BUDGET_S, CPU)


def test_each_call_reads_the_next_of_several_weights():
    seen = []

    def noted(x, weight, bias):
        seen.append((x.data_ptr(), weight.data_ptr()))
        return x @ weight.t() + bias

    x, *held = quantized_linear.INT8.inputs(SHAPE, torch.float32, CPU.device)
    contender = Contender(lambda x, weight, bias, *codes: partial(noted, x, weight, bias))
    call = quantized_linear.rotated(contender, 32).prepare(x, *held)
    results = [call() for _ in range(6)]
    assert len({pointer for pointer, _ in seen}) == 1
    weights = [pointer for _, pointer in seen]
    assert len(set(weights)) == 3 and weights[:3] == weights[3:]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", quantized_linear.KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("make", [quantized_linear.served, quantized_linear.small])
def test_eager_and_ours_give_the_same_product(kind, make):
    result = run(make(kind))
    assert set(result.seconds) == {"copy", "eager", "fusedops"}
    assert not result.refused and not result.inexact


@pytest.mark.parametrize("kind", quantized_linear.KINDS, ids=lambda kind: kind.name)
def test_product_with_another_code_is_refused(kind):
    operation, fused = quantized_linear.served(kind), quantized_linear.fused(kind)

    def prepare(x, weight, bias, qweight, *scales):
        other = qweight.clone()
        other.view(torch.uint8).view(-1)[5] ^= 0x40
        return fused.prepare(x, weight, bias, other, *scales)

    rows = operation.contenders | {"fusedops": replace(fused, prepare=prepare)}
    result = run(replace(operation, contenders=rows))
    assert "norm of the error" in result.refused["fusedops"]


FORMATS = ("int8", "int4", "nf4", "fp8")


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_is_held_against_the_bytes(format):
    """Ours must give the reference's bytes, and bitsandbytes too if it is installed."""
    operation = quantized_linear.quantize(format)
    case = Case(operation, FORWARD, torch.float32, (24, 128))
    result = run_case(case, BUDGET_S, CPU)
    assert {"eager", "fusedops"} <= set(result.seconds) and not result.refused | result.inexact
    ours = operation.contenders["fusedops"]

    def another_code(weight):
        def lines(weight):
            codes, *scales = ours.prepare(weight)()
            codes.view(torch.uint8).view(-1)[5] ^= 0x40
            return codes, *scales

        return partial(lines, weight)

    rows = operation.contenders | {"fusedops": replace(ours, prepare=another_code)}
    wrong = run_case(replace(case, operation=replace(operation, contenders=rows)), BUDGET_S, CPU)
    assert "output 0" in wrong.refused["fusedops"]
