"""AdamW checkpoints survive processes killed while saving; truncated files raise errors."""

import pytest
import torch
from children import forked

from adamw.training import equal_states, parameters, train
from fusedops.optim import AdamW8bit


def test_a_process_that_is_killed_while_it_saves(tmp_path):
    printed = forked("-m", "children.killed_saves", tmp_path).printed(timeout=240)
    assert int(printed) > 0  # some were killed in the midst of a file


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_that_ends_early(share, tmp_path):
    optimizer, other = (AdamW8bit(parameters()) for _ in range(2))
    for each in (optimizer, other):
        train(each, 3)
    path = tmp_path / "state.pt"
    torch.save(optimizer.state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises((RuntimeError, EOFError, OSError)):  # torch.load's
        optimizer.load_state_dict(torch.load(path))
    equal_states(optimizer, other)
    train(optimizer, 2, first=4)
    train(other, 2, first=4)
    equal_states(optimizer, other)
