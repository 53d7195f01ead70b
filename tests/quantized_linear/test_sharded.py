"""QLoRA on several ranks with sharded codes: results, checkpoints, and a killed rank."""

import signal

import pytest
from children import assert_ranks_pass, on_ranks

pytest.importorskip("peft")

ON_TWO = ("as_one_process", "patched_after", "mixed_precision", "ddp", "sharded_codes_stay")
ON_TWO += ("requires_grad_of_a_model", "checkpoints_of_one_process", "save", "load")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder in which two ranks saved a checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    assert_ranks_pass("sharded_qlora", 2, ON_TWO, folder)
    return folder


def test_two_ranks(saved):
    assert (saved / "llama" / ".metadata").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_loads_on_others(saved, ranks):
    assert_ranks_pass("sharded_qlora", ranks, ["load"], saved)


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_whole(saved):
    """The next one is not taken for whole, and the run goes on with the same bits."""
    survivor, dead = on_ranks("sharded_qlora", 2, ["killed"], saved)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode, "the other rank noticed nothing"
    assert [*(saved / "next").glob("*.distcp")] and not (saved / "next" / ".metadata").exists()
    assert_ranks_pass("sharded_qlora", 2, ["load"], saved)
