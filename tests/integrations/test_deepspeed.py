"""Patched models and fused AdamW under DeepSpeed's ZeRO, on two CPU ranks.

DeepSpeed needs no compiler: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`.
"""

import importlib.util

import pytest
from children import forked

if not importlib.util.find_spec("deepspeed"):
    pytest.skip("deepspeed is not there", allow_module_level=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_and_steps_are_those_without_fusedops(stage, tmp_path):
    arguments = 2, tmp_path / "meeting", stage
    ranks = [forked("-m", "children.zero", rank, *arguments, large=True) for rank in range(2)]
    for done in [rank.result(timeout=280) for rank in ranks]:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
