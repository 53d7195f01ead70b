"""FusedOpsCallback for Lightning: patched during fit, restored afterwards, equal losses."""

import inspect
import logging
import textwrap

import pytest
import torch

L = pytest.importorskip("lightning")
pytest.importorskip("transformers")

from patching.models.loss_cases import llama  # noqa: E402

import fusedops  # noqa: E402
from fusedops.integrations.lightning import FusedOpsCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("any_size"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on workers and deprecated names
]
LENGTH, STEPS = 32, 4
BYTES = torch.tensor(list(inspect.getsource(textwrap).encode()))
DATA = BYTES[: 16 * LENGTH].view(16, LENGTH)


class Module(L.LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        self.model = llama(vocab_size=256, use_cache=False)
        self.fails, self.losses, self.classes = fails, [], set()

    def training_step(self, tokens):
        self.classes.add(type(self.model.model.norm))
        if self.fails and self.losses:
            raise ArithmeticError("in the middle")
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return fusedops.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module, *callbacks, kind=L.Trainer):
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = kind(max_steps=STEPS, accelerator="cpu", callbacks=[*callbacks], **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(DATA, batch_size=4))
    return trainer


def classes(module):
    return [type(m) for m in module.modules()]


def test_fit(caplog):
    caplog.set_level(logging.INFO, "fusedops")
    ours, theirs, callback = Module(), Module(), FusedOpsCallback()
    assert callback.report is None
    before = classes(ours)
    fit(ours, callback)
    fit(theirs)
    assert callback.report.coverage["attention"] == (2, 2)
    assert callback.report.coverage["loss"] == (1, 1)
    assert [r.message for r in caplog.records if "fusedops" in r.name] == [str(callback.report)]
    assert ours.classes.isdisjoint(theirs.classes) and classes(ours) == before
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=1e-4)


def test_a_fit_that_raises_restores_the_module():
    module = Module(fails=True)
    before = classes(module)
    with pytest.raises(ArithmeticError, match="in the middle"):
        fit(module, FusedOpsCallback())
    assert module.classes.isdisjoint(before) and classes(module) == before


def test_a_module_that_was_patched_stays_patched():
    module = Module()
    fusedops.patch(module)
    before = classes(module)
    fit(module, FusedOpsCallback(loss=False))
    assert classes(module) == before


def test_checkpoints_load_without_it(tmp_path):
    module = Module()
    trainer = fit(module, FusedOpsCallback())
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    loaded = Module.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=False)
    for name, p in module.named_parameters():
        assert torch.equal(p, loaded.get_parameter(name))


def test_the_trainer_of_pytorch_lightning():
    pl = pytest.importorskip("pytorch_lightning")

    class Small(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.norm, self.classes = torch.nn.LayerNorm(LENGTH), set()

        def training_step(self, tokens):
            self.classes.add(type(self.norm))
            return self.norm(tokens.float()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, callback = Small(), FusedOpsCallback()
    fit(module, callback, kind=pl.Trainer)
    assert callback.report.coverage["norm"] == (1, 1)
    assert torch.nn.LayerNorm not in module.classes and type(module.norm) is torch.nn.LayerNorm


def test_quantize_is_refused():
    with pytest.raises(
        ValueError, match=r"quantize must be None, got 'nf4': call fusedops.quantize"
    ):
        FusedOpsCallback(quantize="nf4")
