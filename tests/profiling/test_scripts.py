"""`fusedops profile SCRIPT` on programs of every kind: a verdict, advice, and the same losses."""

import contextlib
import io
import math
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusedops.profiling import shares
from fusedops.profiling.collect.recorded import with_experiments
from fusedops.profiling.collect.replayed import Batch, loss_of, replayed_step
from fusedops.profiling.command import profile_script
from fusedops.profiling.recording import Recording
from profiling.synthetic import CEILINGS, MS, matmul, step

PROGRAMS = Path(__file__).parent / "programs"
KINDS = (
    "accelerated", "accumulation", "evaluation", "lightning_loop", "trainer", "trl_sft",
    "two_optimizers",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses(run):
    """The losses that a run prints, to the last bit, and what it returns."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = run()
    return [line for line in printed.getvalue().splitlines() if "0x" in line], result


def plainly(program, *arguments):
    """What a program prints without a profile."""
    path, given = str(PROGRAMS / f"{program}.py"), sys.argv
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(PROGRAMS))
    try:
        return losses(lambda: runpy.run_path(path, run_name="__main__"))[0]
    finally:
        sys.path.remove(str(PROGRAMS))
        sys.argv = given


def profiled(program, *arguments, steps=8, **options):
    path = str(PROGRAMS / f"{program}.py")
    return losses(lambda: profile_script(path, arguments, steps, **options)[0])


def answers(report):
    """Whether a report says what limits the step, how fast it is, and what would help."""
    assert report.verdict.bounds != ("unknown",), str(report)
    assert report.verdict.shares["unknown"][1] <= 0.25, str(report)
    assert report.time.tokens_per_s or report.time.samples_per_s
    assert report.time.mfu > 0 and report.advice
    return True


@pytest.mark.parametrize("program", KINDS)
def test_a_program_is_judged_and_unchanged(program):
    printed, report = profiled(program)
    assert answers(report)
    assert printed == plainly(program) and len(printed) >= 12


def test_a_plain_loop():
    printed, report = profiled("plain", "12")
    assert answers(report) and printed == plainly("plain", "12")
    assert report.machine.about["model"] == "Decoder" and report.time.steps == 8
    assert report.input.loader.workers == 0
    assert {"patch", "fused_adamw"} <= {advice.id for advice in report.advice}


@pytest.fixture
def experiments(few_pairs):
    """Options of experiments that have time for all changes on a busy machine too."""
    return {"experiments": True, "budget_s": 120.0}


def test_experiments_leave_the_loop_as_it_was(experiments, monkeypatch):
    """All its operators raise the ceilings, which may have been measured in a busy moment."""
    monkeypatch.setattr(shares, "LONG", 1e-5)
    monkeypatch.setattr(shares, "HIGHEST", math.inf)
    printed, report = profiled("plain", "12", **experiments)
    assert answers(report) and printed == plainly("plain", "12")
    assert report.evidence.cached is not None and report.memory["peak"] > 0
    measured = [advice.measured for advice in report.advice if advice.measured]
    assert measured and all(m.interval[0] <= m.seconds <= m.interval[1] for m in measured)
    assert not re.search("elasticity:|input:|report.measure", str(report))
    rates = re.findall(r"([\d.]+) GFLOP/s\s+of\s+([\d.]+)\s+possible", str(report))
    assert all(float(reached) <= float(possible) for reached, possible in rates)


def test_experiments_restore_all_optimizers_and_use_inputs_of_other_modules(experiments):
    """One optimizer steps in the backward, so each replayed step steps it too."""
    printed, report = profiled("encoder", **experiments)
    assert printed == plainly("encoder") and report.evidence.cached is not None


def test_a_replayed_backward_gives_no_gradients_to_its_inputs():
    """A loop may read them, such as those of inputs that it optimizes."""
    model, learned = torch.nn.Linear(8, 8), torch.randn(2, 8, requires_grad=True)
    offset = torch.zeros(8, requires_grad=True)
    batch = Batch.of((learned, 2 * offset), {"x": learned}, "cpu")
    assert all(t.requires_grad and t.grad_fn is None for t in (*batch.args, batch.kwargs["x"]))
    replayed_step(model, torch.optim.SGD(model.parameters()))(
        [batch._replace(args=batch.args[:1], kwargs={})]
    )
    assert learned.grad is None and model.weight.grad is None


def test_a_loops_operators_raise_the_ceilings_of_its_experiments():
    """What the loop's own step reached is possible, whatever was measured after it."""
    faster, slower = step(matmul(10 * MS, 1.0), recorded=True), step(matmul(10 * MS, 0.5))
    slow = replace(CEILINGS, flops={"float32": 0.8 * CEILINGS.flops["float32"]})
    merged = with_experiments(faster, replace(slower, ceilings=slow))
    assert merged.ceilings.flops["float32"] == pytest.approx(CEILINGS.flops["float32"], rel=0.01)


def test_a_replayed_step_runs_in_the_autocast_of_its_batch_or_of_the_caller():
    """An experiment runs it in bfloat16 although the loop did not."""
    model, dtypes = torch.nn.Linear(8, 8), []
    model.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    replayed = replayed_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = Batch((torch.randn(2, 8),), {}, None)
    replayed([plain, plain._replace(autocast=torch.bfloat16)])
    with torch.autocast("cpu", torch.bfloat16):
        replayed([plain])
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]


class Fields:
    def __init__(self, **fields):
        vars(self).update(fields)


@pytest.mark.parametrize("form", [dict, Fields, lambda **fields: tuple(fields.values())])
def test_a_loss_is_found_in_outputs_of_every_form(form):
    """An output that only has other tensors stands for a loss by their mean."""
    scalar, wide = torch.tensor(3.0, requires_grad=True), torch.ones(4, requires_grad=True)
    assert loss_of(form(logits=wide, loss=scalar)) == 3.0
    assert loss_of(form(logits=wide, count=torch.tensor(7))) == 1.0
    with pytest.raises(RuntimeError, match="whose outputs have gradients"):
        loss_of(form(count=torch.tensor(7)))


def test_experiments_that_raise_do_not_end_the_program(monkeypatch, capsys):
    def fails(*args):
        raise ValueError("no batch fits")

    monkeypatch.setattr(Recording, "experiments", fails)
    printed, report = profiled("plain", "12", experiments=True)
    assert printed == plainly("plain", "12") and report.evidence.cached is None
    assert capsys.readouterr().err.count("profile: no experiments, no batch fits") == 1


def test_three_steps_are_enough_for_a_rough_verdict():
    printed, report = profiled("plain", "3")
    assert answers(report) and printed == plainly("plain", "3")
    assert "only 1 step could be timed" in str(report)


def test_experiments_run_once_after_a_program_without_another_forward(experiments, capsys):
    report = profiled("plain", "3", **experiments)[1]
    assert report.evidence.cached is not None
    assert capsys.readouterr().err.count("VERDICT") == 2


def test_two_steps_are_not():
    with pytest.raises(RuntimeError, match="more than 2 optimizer steps"):
        profiled("plain", "2")


def test_a_program_that_changes_folder_still_knows_its_file(tmp_path, monkeypatch):
    path = tmp_path / "moves.py"
    path.write_text("import os\nos.chdir('/')\nraise SystemExit(__file__)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{re.escape(str(path))}$"):
        profile_script("moves.py", [], 8)


@pytest.mark.parametrize("steps", [5, 50])
def test_a_program_that_raises_has_its_report(steps, capsys):
    with pytest.raises(FloatingPointError):
        profiled("raises", steps=steps)
    report = capsys.readouterr().err
    assert "VERDICT" in report and "samples/s" in report


def test_all_optimizers_are_named():
    report = profiled("two_optimizers")[1]
    assert report.machine.about["optimizers"] == [
        "AdamW of 4 parameters", "Adam of 4 parameters"
    ]  # fmt: skip
    assert "Adam of 4 parameters" in str(report)
