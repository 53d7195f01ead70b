"""Child script: kills processes that save an AdamW optimizer, and checks their last files.

Each save writes to a temporary file and replaces the last file, as a user would. After each kill,
the last file loads, holds the optimizer's state after its step, and training continues from it with
the same bits. Prints how many kills left a part of a file behind.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from adamw.training import equal_states, params_of, train

from fusedops.optim import AdamW8bit

KILLS = 30
MOST_STEPS = 2000
SHAPES = [(300, 1000), (4096,), (33, 7)]


def made():
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw).requires_grad_() for shape in SHAPES]
    return AdamW8bit(params, amsgrad=True)


def save_in_a_loop(folder):
    optimizer = made()
    for step in range(1, MOST_STEPS):
        train(optimizer, 1, first=step)
        saved = {"step": step, "params": params_of(optimizer), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / "new.pt")
        os.replace(folder / "new.pt", folder / "last.pt")


def resumed(saved):
    optimizer = made()
    with torch.no_grad():
        for p, value in zip(params_of(optimizer), saved["params"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


def kill(folder, after):
    """Kills a saving process some seconds after its first file is complete."""
    child = os.fork()
    if child == 0:
        save_in_a_loop(folder)
        os._exit(0)
    while not (folder / "last.pt").exists():
        time.sleep(0.001)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def main(folder):
    draw, parts = random.Random(0), 0
    for i in range(KILLS):
        run_folder = folder / str(i)
        run_folder.mkdir()
        kill(run_folder, draw.random() / 10)
        parts += (run_folder / "new.pt").exists()
        saved = torch.load(run_folder / "last.pt")
        restored, baseline = resumed(saved), made()
        train(baseline, saved["step"])
        equal_states(restored, baseline)
        train(restored, 2, first=saved["step"] + 1)
        train(baseline, 2, first=saved["step"] + 1)
        equal_states(restored, baseline)
    print(parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
