"""The ScaledCopy module, and scaled_copy's line in fusedops.env_report."""

import torch

import fusedops
from scaled_copy.cases import drawn


def test_the_module_is_its_function():
    x, module = drawn((3, 8), torch.bfloat16), fusedops.nn.ScaledCopy(0.25)
    assert torch.equal(module(x), fusedops.functional.scaled_copy(x, 0.25))


def test_the_report_lists_it():
    lines = fusedops.env_report().splitlines()
    assert [x.split()[1] for x in lines if x.startswith("scaled_copy ")] == ["cpu"]
    assert not any("scaled_copy" in x for x in lines if x.startswith("triton "))
