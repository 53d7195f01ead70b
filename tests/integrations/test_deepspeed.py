"""Patched models and fused AdamW under DeepSpeed's ZeRO, on two CPU ranks.

DeepSpeed needs no compiler: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`.
"""

import importlib.util

import pytest
from children import assert_ranks_pass

if not importlib.util.find_spec("deepspeed"):
    pytest.skip("deepspeed is not there", allow_module_level=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_steps_are_those_without_fusedops(stage, tmp_path):
    assert_ranks_pass("zero", 2, [stage], tmp_path)
