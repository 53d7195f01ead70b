"""AdamW on several ranks: FSDP2, DDP, ZeRO, distributed checkpoints. Over gloo, on CPUs."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("sharded_adamw.py")


def run(cases: list[str], ranks: int, folder: Path) -> None:
    """Runs cases on so many ranks; fails with what the first that failed has printed."""
    meeting = folder / f"{cases[0]}-{ranks}"
    arguments = [str(ranks), str(meeting), ",".join(cases), str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), *arguments],
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
