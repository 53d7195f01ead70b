"""Quantized weights on several ranks: their codes are sharded, adapters are trained."""

import signal
from pathlib import Path

import pytest
from children import forked

pytest.importorskip("peft")

ON_TWO = ("as_one_process", "patched_after", "mixed_precision", "ddp", "codes_come_back")
ON_TWO += ("save", "load")


def ended(cases, ranks: int, folder: Path):
    """What the ranks' processes printed and returned."""
    meeting = folder / f"{cases[0]}-{ranks}"
    arguments = ranks, meeting, ",".join(cases), folder
    script = "-m", "children.sharded_qlora"
    processes = [forked(*script, rank, *arguments, large=True) for rank in range(ranks)]
    return [process.result(timeout=280) for process in processes]


def run(cases, ranks: int, folder: Path) -> None:
    for done in ended(cases, ranks, folder):
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the folder in which two ranks saved a checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    run(ON_TWO, 2, folder)
    return folder


def test_two_ranks(saved):
    assert (saved / "llama" / ".metadata").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_loads_on_others(saved, ranks):
    run(["load"], ranks, saved)


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_whole(saved):
    """The next one is not taken for whole, and the run goes on with the same bits."""
    survivor, dead = ended(["killed"], 2, saved)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode, "the other rank noticed nothing"
    assert [*(saved / "next").glob("*.distcp")] and not (saved / "next" / ".metadata").exists()
    run(["load"], 2, saved)
