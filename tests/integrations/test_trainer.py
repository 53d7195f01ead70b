"""Patched models train in transformers' Trainer, accelerate and a plain loop."""

import inspect
import logging
import textwrap

import pytest
import torch
from children import forked

import fusedops

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")

from patching.models import loss_cases  # noqa: E402

from fusedops.integrations.transformers import FusedOpsCallback  # noqa: E402

transformers.logging.set_verbosity_error()
LENGTH, ROWS, STEPS = 48, 32, 4
BYTES = torch.tensor(list(inspect.getsource(textwrap).encode()))
TEXT = [BYTES[i * LENGTH : (i + 1) * LENGTH] for i in range(ROWS)]
DATA = [{"input_ids": row, "labels": row} for row in TEXT]
ADAMW = fusedops.optim.AdamW, {"weight_decay": 0.1}


def llama():
    return loss_cases.llama(vocab_size=256)


def trainer(path, callbacks=(), optimizer=ADAMW, model=None, **arguments):
    arguments = {
        **{"per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2, "seed": 0},
        **{"logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"},
        **{"disable_tqdm": True, **arguments},
    }
    return transformers.Trainer(
        **({"model_init": llama} if model is None else {"model": model}),
        args=transformers.TrainingArguments(output_dir=str(path), **arguments),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer,
    )


def losses(run):
    run.train()
    logged = torch.tensor([row["loss"] for row in run.state.log_history if "loss" in row])
    assert len(logged) == STEPS
    return logged


SETTINGS = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.1},
}


@pytest.mark.parametrize(
    "setting,optimizer", [("float32", None), *((setting, ADAMW) for setting in SETTINGS)]
)
def test_trainer(setting, optimizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "fusedops")
    callback = FusedOpsCallback()
    ours = trainer(tmp_path, [callback], optimizer, llama(), **SETTINGS[setting])
    assert caplog.messages == [str(callback.report)]
    theirs = trainer(tmp_path, (), optimizer, llama(), **SETTINGS[setting])
    near = 2e-2 if setting == "bfloat16" else 2e-4  # losses are logged with four digits
    torch.testing.assert_close(losses(ours), losses(theirs), rtol=near, atol=near)
    assert caplog.messages == [str(callback.report)]  # accelerate's wrappers change nothing
    kinds = {"norm": (5, 5), "attention": (2, 2), "loss": (1, 1)}
    assert kinds.items() <= callback.report.coverage.items()
    actual, expected = (run.evaluate()["eval_loss"] for run in (ours, theirs))
    assert actual == pytest.approx(expected, rel=10 * near)


def test_a_model_that_the_trainer_makes(tmp_path, caplog):
    """model_init makes one with the Trainer and another when training begins."""
    caplog.set_level(logging.INFO, "fusedops")
    callback = FusedOpsCallback(loss=False)
    ours = trainer(tmp_path, [callback])
    first = ours.model
    logged = losses(ours)
    assert ours.model is not first and "loss" not in callback.report.coverage
    assert [m.count("fusedops.patch  norm: 5 of 5 fused") for m in caplog.messages] == [1, 1]
    torch.testing.assert_close(logged, losses(trainer(tmp_path)), rtol=2e-4, atol=2e-4)


def test_the_report_is_shown_where_the_log_shows_its_level():
    """Without logging setup, a program shows only warnings."""
    lines = """
import logging, sys, torch
from fusedops.integrations.transformers import FusedOpsCallback
from types import SimpleNamespace
for setup in (logging.getLogger, lambda: logging.basicConfig(level=logging.INFO)):
    setup()
    print("after", setup, file=sys.stderr)
    for level in (logging.INFO, logging.WARNING):
        for first in (True, False):
            state = SimpleNamespace(is_world_process_zero=first)
            norm = torch.nn.LayerNorm(4)
            FusedOpsCallback(log_level=level).on_init_end(None, state, None, model=norm)
"""
    done = forked("-c", lines, large=True).result()
    assert done.returncode == 0, done.stderr
    shown = [part.count("norm: 1 of 1 fused") for part in done.stderr.split("after")]
    assert shown == [0, 1, 2] and not done.stdout
    line = "fusedops.patch: fused 1 norm in LayerNorm"  # where the report is not shown
    assert [part.count(line) for part in done.stderr.split("after")] == [0, 1, 0]


def test_what_is_saved_is_what_would_be_saved_without(tmp_path):
    ours = trainer(tmp_path / "ours", [FusedOpsCallback()], model=llama(), save_strategy="steps")
    ours.args.save_steps = ours.state.save_steps = 2
    ours.train()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert type(again) is transformers.LlamaForCausalLM
    for name, p in ours.model.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
    resumed = trainer(tmp_path / "ours", [FusedOpsCallback()], model=llama())
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    for p_resumed, p_whole in zip(resumed.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(p_resumed, p_whole)


def test_a_quantized_model_comes_from_the_caller(tmp_path):
    run = trainer(tmp_path, [FusedOpsCallback(quantize="nf4")])
    with pytest.raises(
        ValueError, match=r"quantize must be None when model_init creates the model, got 'nf4'"
    ):
        run.train()


def adapters(model):
    torch.manual_seed(1)
    where = {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **where))


def loop(model, dtype, accumulation=2):
    """fp16 with a scaler, checkpoints and accumulation. The losses and the parameters."""
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, scaler = torch.optim.AdamW(trained, lr=1e-2), torch.amp.GradScaler("cpu", 2.0**8)
    step_losses = []
    for step in range(STEPS * accumulation):
        ids = torch.stack(TEXT[2 * step : 2 * step + 2])
        with torch.autocast("cpu", dtype):
            loss = model(input_ids=ids, labels=ids).loss / accumulation
        scaler.scale(loss).backward()
        step_losses.append(loss.detach().float())
        if (step + 1) % accumulation == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return torch.stack(step_losses), scaler.get_scale()


@pytest.mark.parametrize("order,dtype", [("before", torch.float16), ("after", torch.bfloat16)])
def test_all_of_it_together(order, dtype):
    """LoRA, 16 bits with a scaler, checkpoints, accumulation and clipping."""
    ours, theirs = llama(), adapters(llama())
    if order == "before":
        fusedops.patch(ours)
    ours = adapters(ours)
    if order == "after":
        fusedops.patch(ours)
    (actual, scale), (plain, expected) = loop(ours, dtype), loop(theirs, dtype)
    torch.testing.assert_close(actual, plain, rtol=2e-2, atol=2e-2)
    assert scale == expected and actual[-1] < actual[0]


@pytest.mark.parametrize("order,precision", [("before", "no"), ("after", "bf16")])
def test_accelerate(order, precision):
    def run(patched):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = llama()
        if patched == "before":
            fusedops.patch(model)
        optimizer = fusedops.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if patched == "after":
            fusedops.patch(model)
        step_losses = []
        for step in range(STEPS):
            ids = torch.stack(TEXT[4 * step : 4 * step + 4])
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step_losses.append(loss.detach().float())
        return torch.stack(step_losses)

    near = 1e-5 if precision == "no" else 2e-2
    torch.testing.assert_close(run(order), run(None), rtol=near, atol=near)
