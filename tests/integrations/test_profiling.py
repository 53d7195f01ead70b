"""FusedOpsCallback(profile=...): measurements in the Trainer's logs, for every logger."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data.dataloader import _BaseDataLoaderIter

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fusedops.integrations.transformers import FusedOpsCallback  # noqa: E402
from fusedops.profiling.recording import peak_bytes  # noqa: E402
from integrations.test_trainer import llama, trainer  # noqa: E402

NAMES = {"tokens_per_s", "mfu", "input_share", "peak_mib"}


class Logger(transformers.TrainerCallback):
    """Stands where a Trainer's own loggers stand: before the user's callbacks."""

    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen |= {k: v for k, v in logs.items() if k.startswith("fusedops/")}


def test_measurements_reach_every_logger(tmp_path, caplog):
    logger, callback = Logger(), FusedOpsCallback(profile=5)
    run = trainer(tmp_path, [logger, callback], max_steps=12)
    with caplog.at_level(logging.INFO, "fusedops"):
        run.train()
    assert set(logger.seen) == {f"fusedops/{name}" for name in NAMES}
    assert logger.seen["fusedops/tokens_per_s"] > 0 and 0 < logger.seen["fusedops/mfu"] < 2
    assert 0 <= logger.seen["fusedops/input_share"] < 1
    assert 0 < logger.seen["fusedops/peak_mib"] <= peak_bytes() / 2**20
    rows = [row for row in run.state.log_history if "fusedops/mfu" in row]
    assert len(rows) == 1 and rows[0].items() >= logger.seen.items()
    assert callback.profiled.time.steps == 5
    tokens = callback.profiled.evidence.tokens
    assert tokens.real == tokens.padded == 4 * 48 and tokens.samples == 4
    assert "VERDICT" in caplog.text
    model = run.model
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_recording_does_not_change_the_training(tmp_path):
    def losses(callback):
        run = trainer(tmp_path, [callback], max_steps=8)
        run.train()
        return torch.tensor([row["loss"] for row in run.state.log_history if "loss" in row])

    plain, recorded = losses(FusedOpsCallback()), losses(FusedOpsCallback(profile=3))
    assert torch.equal(plain, recorded)


def test_a_training_that_ends_early(tmp_path):
    callback = FusedOpsCallback(profile=20)
    run = trainer(tmp_path, [callback], max_steps=3)
    run.train()
    assert callback.profiled is None and not run.model._forward_hooks


def test_a_training_that_raises(tmp_path):
    """No mode stays on torch's stack, and the next training begins with a new recording."""
    original, callback, calls = _BaseDataLoaderIter.__next__, FusedOpsCallback(profile=3), []
    run = trainer(tmp_path, [callback], max_steps=8, model=llama())

    def third(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("activations")

    hook = run.model.register_forward_hook(third)
    with pytest.raises(RuntimeError, match="activations"):
        run.train()
    hook.remove()
    assert _get_current_dispatch_mode_stack() == []
    run.train()
    assert callback.profiled.time.steps == 3 and _BaseDataLoaderIter.__next__ is original
    assert not run.model._forward_pre_hooks and not run.model._forward_hooks


def test_a_wrong_number_of_steps():
    with pytest.raises(ValueError, match="profile must be at least 1 step, got 0"):
        FusedOpsCallback(profile=0)
