"""AdamW steps correctly on several ranks: FSDP2, DDP, ZeRO, distributed checkpoints."""

import pytest
from children import assert_ranks_pass

EVERYWHERE = ["fsdp", "fsdp_8bit", "clipping"]
ON_TWO = [*EVERYWHERE, "specs", "ddp", "zero", "copies", "plain", "memory", "save"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder in which two ranks saved a checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    assert_ranks_pass("sharded_adamw", 2, ON_TWO, folder)
    return folder


def test_two_ranks(saved):
    assert (saved / "checkpoint").is_dir()


def test_four_ranks_and_a_checkpoint_of_two(saved):
    assert_ranks_pass("sharded_adamw", 4, [*EVERYWHERE, "load"], saved)


def test_a_checkpoint_of_two_ranks_loads_on_one(saved):
    assert_ranks_pass("sharded_adamw", 1, ["load"], saved)
