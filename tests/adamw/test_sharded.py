"""AdamW steps correctly on several ranks: FSDP2, DDP, ZeRO, distributed checkpoints."""

from pathlib import Path

import pytest
from children import forked

EVERYWHERE = ["fsdp", "fsdp_8bit", "clipping"]
ON_TWO = [*EVERYWHERE, "specs", "ddp", "zero", "copies", "plain", "memory", "save"]


def run(cases: list[str], ranks: int, folder: Path) -> None:
    """Runs cases on so many ranks; fails with what the first that failed has printed."""
    meeting = folder / f"{cases[0]}-{ranks}"
    arguments = ranks, meeting, ",".join(cases), folder
    script = "-m", "children.sharded_adamw"
    processes = [forked(*script, rank, *arguments, large=True) for rank in range(ranks)]
    for done in [process.result(timeout=280) for process in processes]:
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder in which two ranks saved a checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    run(ON_TWO, 2, folder)
    return folder


def test_two_ranks(saved):
    assert (saved / "checkpoint").is_dir()


def test_four_ranks_and_a_checkpoint_of_two(saved):
    run([*EVERYWHERE, "load"], 4, saved)


def test_a_checkpoint_of_two_ranks_loads_on_one(saved):
    run(["load"], 1, saved)
