"""FUSEDOPS_CPU_ISA selects each instruction set of this CPU and refuses others."""

import os
from pathlib import Path

import pytest
import torch
from children import forked

LEVELS = ["none", "avx2", "avx512", "avx512_bf16"]
KERNELS = "cpu and (test_forward_and_gradients and (33 or 1024 or 4099) or test_several)"
KERNELS += " or cpu and (test_step or test_rows_of_blocks or test_squares or test_scale)"
KERNELS += " or test_kernels_make_the_bytes"
# what calls the operators without asking for the backend `cpu`, which needs AVX2
DEFINITIONS = "test_double_backward and default or test_inference_mode or test_module_twins"
DEFINITIONS += " or test_add_modules or TestClipping or test_adamw_state"
FILES = [
    "tests/adamw/test_kernels.py",
    "tests/adamw/test_mixed_precision.py",
    "tests/adamw/test_state.py",
    "tests/adamw/test_torch.py",
    "tests/attention/test_kernels.py",
    "tests/contract/test_autograd.py",
    "tests/cross_entropy/test_kernels.py",
    "tests/cross_entropy/test_linear.py",
    "tests/norm/test_kernels.py",
    "tests/norm/test_modules.py",
    "tests/gated_activation/test_kernels.py",
    "tests/linear/test_kernels.py",
    "tests/quantized_linear/test_kernels.py",
    "tests/quantized_linear/test_weight.py",
    "tests/rotary/test_kernels.py",
    "tests/rotary/test_torch.py",
]

# A named level is without the matrix unit, which multiplies with quantized weights.
MATRIX_UNIT = torch.cpu._is_amx_tile_supported()
QUANTIZED = ["tests/quantized_linear/test_kernels.py"]

RUN_TESTS = """
import sys
import pytest
from fusedops.extension import _C

level, selection, *files = sys.argv[1:]
assert _C.cpu_isa() == level
sys.exit(pytest.main([*files, "-q", "-p", "no:cacheprovider", "-k", selection]))
"""


def python(code, *args, isa):
    env = os.environ | {"FUSEDOPS_CPU_ISA": isa}
    return forked("-c", code, *args, cwd=Path(__file__).parents[2], env=env).result(timeout=600)


def cpu_isa(isa):
    return python("from fusedops.extension import _C; print(_C.cpu_isa())", isa=isa)


@pytest.fixture(scope="module")
def best():
    """Returns the CPU's own instruction set; an empty FUSEDOPS_CPU_ISA changes nothing."""
    return cpu_isa("").stdout.strip()


@pytest.mark.parametrize("level", LEVELS)
def test_level(level, best):
    if LEVELS.index(level) > LEVELS.index(best):
        run = cpu_isa(level)
        assert run.returncode == 1
        assert f"FUSEDOPS_CPU_ISA: this CPU has {best}, got {level}" in run.stderr
        return
    if level == best and not MATRIX_UNIT:  # whose kernels all other tests run
        assert cpu_isa(level).stdout.strip() == level
        return
    files = QUANTIZED if level == best else FILES
    run = python(RUN_TESTS, level, DEFINITIONS if level == "none" else KERNELS, *files, isa=level)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(not MATRIX_UNIT, reason="no matrix unit")
def test_a_named_level_is_without_the_matrix_unit(best):
    plan = "from fusedops.extension import _C\n"
    plan += "print(_C.quantized_linear_plan('nf4', 64, 256, 64, 3, 'none', 'any'))"
    assert "matrix unit" in python(plan, isa="").stdout
    assert "in registers" in python(plan, isa=best).stdout


def test_unknown_level():
    run = cpu_isa("sse4")
    assert run.returncode == 1
    message = "FUSEDOPS_CPU_ISA must be none, avx2, avx512 or avx512_bf16, got sse4"
    assert message in run.stderr
