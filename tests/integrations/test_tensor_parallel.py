"""Patched models under tensor and expert parallelism match one process and run its kernels."""

import pytest
from axes import grid
from children import forked

pytest.importorskip("transformers.distributed")

MODELS = "llama", "gemma2", "mixtral", "qwen3_moe"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The lines of all ranks: all cases run in one start, as imports take most of the time."""
    script = "-m", "children.tensor_parallel"
    done = forked(*script, tmp_path_factory.mktemp("ranks"), large=True).result(timeout=280)
    return (done.stdout + done.stderr).splitlines()


def assert_passed(case, ranks, printed):
    for rank in range(ranks):
        assert f"{case} rank {rank} of {ranks}" in printed, "\n".join(printed)[-4000:]


@grid("name,ranks", [*((name, 2) for name in MODELS), ("llama", 4), ("qwen3_moe", 4)])
def test_patched_after(name, ranks, printed):
    assert_passed(f"patched_after {name}", ranks, printed)


@grid("patched", ["after", "before"])
@grid("name", ["mixtral", "qwen3_moe"])
def test_expert_parallel(name, patched, printed):
    assert_passed(f"by_experts_{patched} {name}", 2, printed)


def test_a_tied_head(printed):
    assert_passed("patched_after gemma2 tied", 2, printed)


def test_torchs_sequence_parallel_plan(printed):
    assert_passed("by_torchs_plan llama", 2, printed)


def test_compiled(printed):
    assert_passed("compiled llama", 2, printed)


@grid("name", MODELS)
def test_patched_before(name, printed):
    assert_passed(f"patched_before {name}", 2, printed)
