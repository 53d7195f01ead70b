"""fusedops.tune: the rules, the printed code, and whole runs on small models."""

import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from patching.architectures import PLAIN
from sweeping.cases import llama, tokens
from sweeping.machine import Machine
from torch import nn

import fusedops
from fusedops.__main__ import main
from fusedops.measuring.ratios import Ratio
from fusedops.patching.core.swap import fused_modules
from fusedops.tuning import run, running, tuner
from fusedops.tuning.knobs import KNOBS, TunedStep
from fusedops.tuning.rules import Limits, MeasuredSetting, judge
from fusedops.tuning.setting import Setting
from fusedops.tuning.trial import Trial

FASTER, SLOWER, SAME = Ratio(1.2, 1.1, 1.3), Ratio(0.8, 0.7, 0.9), Ratio(1.0, 0.9, 1.1)
SLIGHTLY = Ratio(1.015, 1.01, 1.03)


RULES = {
    # name: (before, after, ratio, limits, kept, why)
    "faster": ((1.0, 100), (0.8, 100), FASTER, {}, True, "faster"),
    "slower": ((1.0, 100), (1.2, 50), SLOWER, {}, False, "slower"),
    "same": ((1.0, 100), (1.0, 50), SAME, {}, False, "no difference"),
    "too large": ((1.0, 90), (0.8, 110), FASTER, {"memory": 100}, False, "over the memory limit"),
    "was too large": ((1.0, 120), (1.5, 110), SLOWER, {"memory": 100}, True, "less memory"),
    "stays too large": ((1.0, 120), (0.5, 119), FASTER, {"memory": 100}, False, "does not bring"),
    "too late": ((1.0, 1), (1.2, 1), FASTER, {"p95": 1.1}, False, "over the p95 budget"),
    "was too late": ((1.5, 1), (1.3, 1), SAME, {"p95": 1.1}, True, "closer to the p95"),
    "stays too late": ((1.5, 1), (1.6, 1), SAME, {"p95": 1.1}, False, "not closer"),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_kept(name):
    (was, held), (seconds, holds), ratio, limits, kept, why = RULES[name]
    before, after = MeasuredSetting(was, was, held), MeasuredSetting(seconds, seconds, holds)
    verdict, text = judge(before, after, ratio, Limits(**limits))
    assert verdict == kept
    assert text.startswith(why)


def test_what_alters_results_must_gain_two_percent():
    step = MeasuredSetting(1.0, None, 1)
    assert judge(step, step, SLIGHTLY, Limits(), KNOBS["patch"].least) == (True, "faster")
    kept, why = judge(step, step, SLIGHTLY, Limits(), KNOBS["bf16"].least)
    assert (kept, why) == (False, "less than 2% faster")


def test_a_p95_that_is_not_known_counts_by_the_median():
    assert Limits(p95=1.0).over_p95(MeasuredSetting(1.1, None, 1))
    assert not Limits(p95=1.0).over_p95(MeasuredSetting(0.9, None, 1))
    assert Limits(p95=1.0).over_p95(MeasuredSetting(0.9, 1.1, 1))


def ran(setting: Setting, steps: int = 3) -> tuple[nn.Module, list[float]]:
    """The model after a few steps of the setting's code, and the losses."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    defined: dict = {}
    exec(setting.code, defined)
    model, optimizer, step = defined["tuned"](model, optimizer)
    torch.manual_seed(1)
    return model, [float(step(tokens(8, 8))) for _ in range(steps)]


@pytest.mark.parametrize(
    ("more", "near"),
    [
        ({"changes": ("patch",)}, 1e-5),
        ({"changes": ("fused_adamw",)}, 1e-5),
        ({"changes": ("adamw8bit",)}, 1e-2),
        ({"changes": ("bf16",)}, 2e-2),
        ({"changes": ("checkpoint",)}, 1e-6),
        ({"micro_batches": 2}, 1e-5),
        ({"micro_batches": 4, "changes": ("bf16", "patch")}, 2e-2),
        ({"changes": ("compile",)}, 1e-5),
    ],
    ids=str,
)
def test_the_code_trains(more, near):
    """Its losses are the plain step's."""
    _, plain = ran(Setting(8))
    model, losses = ran(replace(Setting(8), **more))
    assert losses == pytest.approx(plain, rel=near)
    assert bool(fused_modules(model)) == ("patch" in more.get("changes", ()))


def test_the_code_takes_up_the_optimizers_state():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tokens(2, 8)).loss.backward()
    optimizer.step()
    defined: dict = {}
    exec(Setting(8, ("fused_adamw",)).code, defined)
    _, other, _ = defined["tuned"](model, optimizer)
    for p, state in optimizer.state.items():
        torch.testing.assert_close(other.state[p]["exp_avg"], state["exp_avg"])


def test_the_code_quantizes_frozen_weights_alone():
    """An adapter that is trained stays as it is."""
    model = llama()
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    defined: dict = {}
    exec(Setting(8, ("quantize_lora",)).code, defined)
    model, _, step = defined["tuned"](model, optimizer)
    kinds = {name: type(m) for name, m in model.named_modules() if "proj" in name}
    for name, kind in kinds.items():
        assert (kind is nn.Linear) == ("q_proj" in name), name
    assert torch.isfinite(step(tokens(8, 8)))


def test_micro_batches_cut_what_has_a_row_a_sample():
    """Tensors of one row and scalars go to each part whole."""
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, positions, scale, labels):
            seen.append((len(x), positions.shape, scale.shape))
            return SimpleNamespace(loss=scale * ((self.weight * x - labels) ** 2).mean())

    model, defined = Model(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exec(Setting(8, micro_batches=4).code, defined)
    model, _, step = defined["tuned"](model, optimizer)
    x, labels = torch.randn(8, 2), torch.randn(8, 2)
    batch = {"x": x, "labels": labels, "positions": torch.ones(1, 3), "scale": torch.tensor(2.0)}
    assert step(batch) == pytest.approx(float(2 * ((x - labels) ** 2).mean()))
    assert seen == 4 * [(2, (1, 3), ())]
    whole = torch.autograd.grad(2 * ((model.weight * x - labels) ** 2).mean(), model.weight)[0]
    torch.testing.assert_close(model.weight.grad, whole)


def test_the_code_keeps_the_optimizers_options():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), maximize=True, amsgrad=True)
    defined: dict = {}
    exec(Setting(8, ("fused_adamw",)).code, defined)
    _, other, _ = defined["tuned"](model, optimizer)
    assert [other.param_groups[0][name] for name in ("maximize", "amsgrad")] == [True, True]


def test_a_run_leaves_everything_as_it_was(tmp_path):
    """Bit for bit; and the winner's code runs in a fresh process."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tokens(2, 8)).loss.backward()
    optimizer.step()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    names = ["patch", "fused_adamw", "checkpoint", "workers", "quantize_lora"]
    tuning = fusedops.tune(
        tokens, model=model, optimizer=optimizer, batch=4, length=8, knobs=names, budget_s=20
    )
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), state, rtol=0, atol=0)
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert (torch.get_num_threads(), fused_modules(model)) == (threads, set())
    assert torch.equal(torch.get_rng_state(), generator)
    assert [trial.knob for trial in tuning.trials] == ["baseline", *names]
    tried = [trial for trial in tuning.trials if trial.found is not None]
    assert [trial.knob for trial in tried] == ["baseline", "patch", "fused_adamw"]
    for trial in tried:
        assert trial.loss == pytest.approx(trial.baseline_loss, rel=1e-4)
        assert trial.found.peak_bytes > 0
    assert tuning.best == [trial.setting for trial in tuning.trials if trial.kept][-1]
    assert tuning.code in str(tuning)
    tuning.save(tmp_path / "tuning.json")
    assert json.loads((tmp_path / "tuning.json").read_text())["code"] == tuning.code
    subprocess.run([sys.executable, "-c", tuning.code], check=True)


@pytest.fixture
def machine(monkeypatch):
    """A fake clock that only a Slow model advances: other programs change nothing."""
    machine = Machine()
    machine.install(monkeypatch, run, running, tuner)
    monkeypatch.setattr(Slow, "machine", machine)
    return machine


class Slow(nn.Module):
    """Takes so many seconds of the machine for each sample and for each call.

    disturbed: whether other programs have the CPU meanwhile.
    """

    machine = Machine()  # the class's, which copies of a model share

    def __init__(
        self, per_sample: float = 0.0, per_call: float = 0.0, disturbed: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.per_sample, self.per_call, self.disturbed = per_sample, per_call, disturbed

    def forward(self, x, labels):
        seconds = self.per_sample * len(x) + self.per_call
        self.machine.seconds += seconds
        self.machine.elsewhere += self.disturbed * seconds
        return SimpleNamespace(loss=(self.weight * x - labels).square().mean())


def samples(batch, length):
    return {"x": torch.ones(batch, 4), "labels": torch.zeros(batch, 4)}


@pytest.mark.usefixtures("machine")
def test_a_slower_knob_is_undone():
    model = Slow(per_call=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuning = fusedops.tune(
        samples,
        model=model,
        optimizer=optimizer,
        batch=8,
        knobs=["micro_batch", "adamw8bit"],
        budget_s=5,
    )
    _, micro, adamw = tuning.trials
    assert (micro.kept, micro.why) == (False, "slower")
    assert micro.ratio.median < 0.7
    assert adamw.why == "the optimizer is torch.optim.sgd.SGD, not torch.optim.AdamW"
    assert tuning.best == Setting(8)
    assert tuning.ratio == (1.0, 1.0, 1.0)


@pytest.mark.usefixtures("machine")
def test_smaller_batches_meet_a_p95_budget():
    model = Slow(per_sample=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuning = fusedops.tune(
        samples, model=model, optimizer=optimizer, batch=8, p95=0.075, knobs=[], budget_s=12
    )
    assert [trial.knob for trial in tuning.trials][:2] == ["baseline", "batch"]
    assert tuning.best.batch == 4
    assert tuning.code.startswith("# batches of 4\n")


@pytest.mark.usefixtures("machine")
def test_a_trial_without_time_for_its_steps_is_not_begun():
    """22 steps of 0.15 seconds, or 12 of the shortest; the baseline has taken 9."""
    model = Slow(per_call=0.15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuning = fusedops.tune(
        samples, model=model, optimizer=optimizer, batch=8, knobs="micro_batch", budget_s=3
    )
    assert re.fullmatch("the budget has no 3.* s left for it", tuning.trials[1].why)
    assert "nothing was tried" in str(tuning) and "best:" not in str(tuning)
    assert "budget_s=10 (--budget 10) has time for all of them" in str(tuning)
    assert tuning.best == Setting(8)


@pytest.mark.usefixtures("machine")
def test_a_budget_too_small_for_the_baseline_names_one_that_has_time():
    """Steps of 0.15 seconds: 13 for the baseline and 22 for a trial, and a tenth more."""
    model = Slow(per_call=0.15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"model": model, "optimizer": optimizer, "batch": 8, "knobs": "micro_batch"}
    with pytest.raises(ValueError, match=r"budget_s=6 \(--budget 6\) has time for a trial"):
        fusedops.tune(samples, budget_s=0.5, **options)
    assert fusedops.tune(samples, budget_s=6, **options).trials[1].ratio is not None


def test_the_first_trial_may_take_what_is_left(machine):
    """The baseline's 9 steps of 0.15 seconds and the 12 of a trial; four fifths are for others."""
    model = Slow(per_sample=0.15 / 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knobs = ["micro_batch", "bf16"]
    tuning = fusedops.tune(
        samples, model=model, optimizer=optimizer, batch=8, knobs=knobs, budget_s=3.6
    )
    assert tuning.trials[1].ratio is not None and not tuning.trials[1].kept
    assert "the budget has no" in tuning.trials[2].why
    assert 0.8 * 3.6 < machine.seconds < 3.6


def test_without_time_the_only_kept_trial_is_the_last_comparison(machine):
    model = Slow(per_call=0.1)
    subject = TunedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    last = tuner.Tuner(subject, samples, None, "latency", Limits(), 1.0, 1.0)
    assert last.final(kept_trials(0.1)) == FASTER
    assert machine.seconds == 0


def test_the_last_of_several_kept_trials_is_compared_with_the_baseline(machine):
    """Its own comparison was with the trial before it."""
    model = Slow(per_call=0.1)
    subject = TunedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    last = tuner.Tuner(subject, samples, None, "latency", Limits(), 1.0, 1.0)
    kept = kept_trials(0.1)
    again = replace(kept[-1], setting=Setting(8, micro_batches=4))
    assert last.final([*kept, again]) != FASTER
    assert machine.seconds > 0


def kept_trials(seconds):
    """The baseline, and a trial with smaller batches."""
    measured = MeasuredSetting(seconds, seconds, 1)
    baseline = Trial("baseline", Setting(8), measured, kept=True)
    return [
        baseline,
        Trial("micro_batch", Setting(8, micro_batches=2), measured, FASTER, kept=True),
    ]


def test_the_last_comparison_ends_in_time_though_other_programs_disturb(machine):
    """Disturbed rounds are repeated, and here every round is one."""
    model = Slow(per_sample=0.005, disturbed=True)
    subject = TunedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    last = tuner.Tuner(subject, samples, None, "latency", Limits(), 4.0, 4.0)
    last.final(kept_trials(0.04))
    a_round = 2 * 8 * 0.005  # seconds
    assert 4 - a_round < machine.seconds <= 4


@pytest.mark.parametrize(("capability", "runs"), [("AVX512", True), ("AVX2", False)])
def test_bfloat16_is_tried_where_something_multiplies_it(capability, runs, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = Slow()
    subject = TunedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    why = KNOBS["bf16"].without(subject, Setting(1))
    assert (why == "") is runs
    assert KNOBS["bf16"].without(subject, Setting(1, ("patch",))) == ""


def test_one_optimizer_replaces_another():
    setting = KNOBS["fused_adamw"].turn(Setting(8, ("patch",)))
    assert KNOBS["adamw8bit"].turn(setting).changes == ("patch", "adamw8bit")


@pytest.mark.usefixtures("machine")
def test_a_trial_that_raises_is_a_trial():
    class Fussy(Slow):
        def forward(self, x, labels):
            if len(x) < 8:
                raise RuntimeError("eight samples, please")
            return super().forward(x, labels)

    model = Fussy(per_call=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuning = fusedops.tune(
        samples, model=model, optimizer=optimizer, batch=8, knobs="micro_batch", budget_s=3
    )
    assert tuning.trials[1].why == "the step raised RuntimeError: eight samples, please"
    assert tuning.best == Setting(8)


def test_knobs_say_why_they_cannot_be_turned():
    model = Slow()
    subject = TunedStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reasons = {name: knob.without(subject, Setting(1)) for name, knob in KNOBS.items()}
    assert reasons["adamw8bit"] == "the optimizer is torch.optim.sgd.SGD, not torch.optim.AdamW"
    assert reasons["checkpoint"] == "the model has no gradient_checkpointing_enable()"
    assert reasons["micro_batch"] == "1 samples have no 2 equal parts"
    assert reasons["workers"] == "make_batch takes 0.0% of the step"
    assert reasons["quantize_lora"] == "less than half of the parameters is frozen linears"
    assert not KNOBS["workers"].without(replace(subject, input_share=0.5), Setting(1))


def test_the_command_line(tmp_path, capsys):
    path, out = tmp_path / "config.json", tmp_path / "tuning.json"
    path.write_text(json.dumps(PLAIN | {"model_type": "llama"}))
    command = ["tune", str(path), "--batch", "2", "--length", "8", "--knobs", "patch"]
    assert main([*command, "--budget", "8", "--json", str(out)]) == 0
    assert "def tuned(model, optimizer):" in capsys.readouterr().out
    assert json.loads(out.read_text())["trials"][1]["knob"] == "patch"
    assert main([*command, "--json", str(tmp_path / "no" / "out.json")]) == 1
    assert "tune: json must be a file in a folder that exists" in capsys.readouterr().err
    assert main(["tune", "no-such-model"]) == 1
    assert "fusedops tune: model must be a folder" in capsys.readouterr().err


BAD = {
    "model": ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
    "device": (
        {"model": nn.Linear(2, 2, device="meta")},
        ValueError,
        "on the CPU, got weight on meta",
    ),
    "optimizer": ({"optimizer": None}, TypeError, "optimizer must be a torch.optim.Optimizer"),
    "batch": ({"batch": 0}, ValueError, "batch must be an integer of at least 1, got 0"),
    "goal": ({"goal": "joy"}, ValueError, "goal must be one of throughput, latency, got 'joy'"),
    "knob": ({"knobs": ["luck"]}, ValueError, "knobs must be among patch, .* got 'luck'"),
    "budget": ({"budget_s": 0}, ValueError, "budget_s must be more than 0 seconds, got 0"),
    "memory": ({"memory": 0.5}, TypeError, "memory must be bytes as an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    given, error, text = BAD[name]
    model = Slow()
    fine = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batch": 2}
    with pytest.raises(error, match=text):
        fusedops.tune(samples, **fine | given)


def test_batches_must_be_dictionaries_of_tensors():
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="make_batch must give a dictionary of tensors, got list"):
        fusedops.tune(lambda batch, length: [1], model=model, optimizer=optimizer, batch=2)


def test_a_batch_without_labels_is_refused():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"batch needs labels, got input_ids$"):
        fusedops.tune(
            lambda batch, length: {"input_ids": tokens(batch, length)["input_ids"]},
            model=model,
            optimizer=optimizer,
            batch=2,
        )
