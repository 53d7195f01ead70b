"""AdamW on several ranks: FSDP2, DDP, ZeRO, distributed checkpoints; gloo on CPUs."""

import subprocess
from pathlib import Path

from children import TESTS, command


def run(cases: list[str], ranks: int, folder: Path) -> None:
    """Runs cases on so many ranks; fails with what the first that failed has printed."""
    meeting = folder / f"{cases[0]}-{ranks}"
    arguments = ranks, meeting, ",".join(cases), folder
    processes = [
        subprocess.Popen(
            command("sharded_adamw", rank, *arguments),
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=280)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text[-4000:]


def test_two_ranks(tmp_path):
    run(
        ["fsdp", "fsdp_8bit", "clipping", "specs", "ddp", "zero", "copies", "plain", "memory"],
        2,
        tmp_path,
    )


def test_four_ranks(tmp_path):
    run(["fsdp", "fsdp_8bit", "clipping"], 4, tmp_path)


def test_a_checkpoint_of_two_ranks_loads_on_any(tmp_path):
    run(["save"], 2, tmp_path)
    for ranks in (1, 4):
        run(["load"], ranks, tmp_path)
