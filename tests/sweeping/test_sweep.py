"""fusedops.sweep on small models: rows, limits, errors, commands, and an unchanged model."""

import copy
import itertools
import json
from time import sleep

import pytest
import torch
from patching.architectures import PLAIN
from torch import nn

import fusedops
from fusedops import measured
from fusedops.__main__ import main
from fusedops.backends import cpu_name
from fusedops.measuring import sampling
from fusedops.measuring.memory.memory_use import MemoryUse
from fusedops.patching.core.swap import fused_modules
from fusedops.sweeping import command, modes
from fusedops.sweeping.result import Sweep
from fusedops.sweeping.room import Peaks
from fusedops.sweeping.variants import variant
from sweeping.cases import WORDS, llama, tokens


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Sweeps end by their rounds and not by the clock of a busy machine."""
    monkeypatch.setattr(sampling, "MOST", 7)


@pytest.fixture
def model():
    return llama()


def fused(model: nn.Module) -> bool:
    return any(True for _ in fused_modules(model))


def rows(sweep: Sweep) -> list[tuple]:
    return [(row.variant, row.batch, row.length) for row in sweep.rows]


def test_training_leaves_everything_as_it_was(model):
    """Bit for bit: parameters, gradients, optimizer state, modes, generators; unpatched."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(**tokens(2, 8)).loss.backward()
    optimizer.step()
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [p.grad.clone() for p in model.parameters()]
    modes, generator = [m.training for m in model.modules()], torch.get_rng_state()
    sweep = fusedops.sweep(
        tokens,
        model=model,
        optimizer=optimizer,
        batch=(1, 2),
        length=(8, 16),
        variants=("eager", "patched", "quantized:int8"),
        budget_s=300,
    )
    points = [(b, n) for n in (8, 16) for b in (1, 2)]
    names = ("eager", "patched", "quantized:int8")
    assert rows(sweep) == [(name, b, n) for b, n in points for name in names]
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), state, rtol=0, atol=0)
    assert all(map(torch.equal, gradients, [p.grad for p in model.parameters()]))
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(torch.get_rng_state(), generator)
    assert not fused(model)
    for row in sweep.rows:
        assert (row.ratio is None) == (row.variant == "eager")
        assert row.samples >= 6
        assert row.peak_bytes > 0
        assert row.tokens_per_s == pytest.approx(row.throughput * row.length)
    first = [row for row in sweep.rows if (row.batch, row.length) == (1, 8)]
    assert all(row.predicted_bytes is None for row in first)
    assert all(row.predicted_bytes for row in sweep.rows if row not in first)


def test_variants_run_what_they_say(model):
    batch = tokens(2, 8)
    eager = variant("eager", "forward").model(model)
    patched = variant("patched", "forward").model(model)
    quantized = variant("quantized:nf4+patched", "forward").model(model)
    compiled = variant("compiled", "forward").model(model)
    assert fused(patched)
    assert not fused(eager)
    assert fused(quantized)
    assert any(isinstance(m, fusedops.nn.QuantizedLinear) for m in quantized.modules())
    assert compiled._compiled_call_impl is not None
    assert all(map(lambda a, b: a is b, model.parameters(), patched.parameters()))
    torch.testing.assert_close(patched(**batch).loss, model(**batch).loss)


def test_eager_is_unpatched_even_if_the_model_is_patched(model):
    fusedops.patch(model)
    assert not fused(variant("eager", "train").model(model))
    assert fused(model)


@pytest.mark.parametrize("name", ["eager", "static", "quantized:nf4+patched"])
def test_generation_times_each_token(model, name, monkeypatch):
    """A clock that ticks each time it is read: once before, after each token, and at the end."""
    ticks = itertools.count()
    monkeypatch.setattr(modes, "perf_counter", lambda: float(next(ticks)))
    row = generated(model, name)
    assert row.samples % 4 == 0
    assert row.samples >= 24  # 6 runs, the first token of each apart
    assert (row.first_token, row.p50, row.end_to_end) == (1, 1, 6)
    assert row.tokens_per_s == pytest.approx(2 * 5 / row.end_to_end)


def generated(model, name):
    model.generation_config.eos_token_id = None
    (row,) = fusedops.sweep(
        tokens,
        model=model,
        mode="generate",
        variants=[name],
        batch=2,
        length=6,
        new_tokens=5,
        budget_s=300,
    ).rows
    return row


def test_a_step_of_ones_own():
    weight = torch.randn(64, 64)
    sweep = fusedops.sweep(
        lambda batch, length: torch.randn(batch, 64),
        step=lambda x: x @ weight,
        batch=(1, 2),
        budget_s=300,
        memory_limit=1.0,
    )
    assert rows(sweep) == [("eager", 1, None), ("eager", 2, None)]
    assert sweep.mode == "step"


def test_points_over_the_limit_are_skipped(model):
    ran = []

    def make(batch, length):
        ran.append(batch)
        return tokens(batch, length)

    limit = 2 * sum(p.nbytes for p in model.parameters()) + 4_000_000
    sweep = fusedops.sweep(
        make,
        model=model,
        variants="eager",
        batch=(1, 2, 4096),
        length=16,
        memory_limit=limit,
        budget_s=300,
        past_knee=True,
    )
    *_, skipped = sweep.rows
    assert ran == [1, 2]
    assert "its predicted peak is" in skipped.skipped_reason
    assert skipped.predicted_bytes > limit
    assert skipped.p50 is None
    assert f"batch 4096, length 16: skipped, {skipped.skipped_reason}" in sweep.table()


def test_memory_is_the_reason_also_when_the_budget_is_used_up(model):
    limit = 2 * sum(p.nbytes for p in model.parameters()) + 4_000_000
    batches = (1, 2, *range(3, 300), 4096)
    asked = {"variants": "eager", "batch": batches, "length": 16, "past_knee": True}
    sweep = fusedops.sweep(tokens, model=model, memory_limit=limit, budget_s=2, **asked)
    assert sweep.rows[1].p50 is not None
    assert "the budget is used up" in {row.skipped_reason for row in sweep.rows}
    assert "its predicted peak is" in sweep.rows[-1].skipped_reason


def use(peak: int, activations: int, at_peak: int) -> MemoryUse:
    """300 bytes of parameters and state at every time; gradients have what is left of the peak."""
    held = {"parameters": 100, "optimizer_state": 200, "activations": at_peak}
    zero = dict.fromkeys(("frozen", "buffers", "gradients", "inputs", "logits", "kv_cache"), 0)
    return MemoryUse(
        **zero,
        parameters=100,
        optimizer_state=200,
        activations=activations,
        temporaries=0,
        peak=peak,
        slack=0,
        at_peak=held | {"gradients": peak - sum(held.values())},
    )


def test_peaks_of_larger_points():
    """Linear in the batch, square in the length once two lengths are known."""
    peaks = Peaks()
    assert peaks.predict(1, 8) is None
    peaks.add(1, 8, use(300 + 80, 80, 80))
    assert peaks.predict(2, 8) == 300 + 160
    peaks.add(2, 8, use(300 + 170, 170, 170))  # 10 bytes more a sample than the first point said
    assert peaks.predict(4, 8) == 290 + 4 * 90
    peaks = Peaks()
    for batch, length in ((1, 8), (2, 8), (1, 16), (2, 16)):
        size = batch * (3 * length + length**2)
        peaks.add(batch, length, use(300 + size, size, size))
    assert peaks.predict(4, 64) == pytest.approx(300 + 4 * (3 * 64 + 64**2), rel=1e-6)


def test_a_peak_in_the_optimizer_does_not_hide_the_forwards():
    peaks = Peaks()
    peaks.add(1, 8, use(1000, 80, 0))
    assert peaks.predict(2, 8) == 1000
    assert peaks.predict(100, 8) == 300 + 8000


def test_the_budget_ends_a_sweep(model):
    sweep = fusedops.sweep(tokens, model=model, batch=range(1, 40), budget_s=0.5, past_knee=True)
    assert len(sweep.rows) == 2 * 39
    left = [row.skipped_reason for row in sweep.rows if row.skipped_reason]
    assert left
    assert all("the budget" in reason for reason in left)


BAD = {
    "neither": ({"model": None}, ValueError, "needs either model or step, got neither"),
    "both": ({"step": print}, ValueError, "needs either model or step, got both"),
    "model": ({"model": 3}, TypeError, "model must be a torch.nn.Module or None, got int"),
    "device": (
        {"model": nn.Linear(2, 2, device="meta")},
        ValueError,
        "on the CPU, got weight on meta",
    ),
    "batch": ({"batch": (0,)}, ValueError, "batch must be an integer of at least 1, got 0"),
    "no batch": ({"batch": ()}, ValueError, "batch must have at least one size"),
    "length": ({"length": "long"}, ValueError, "length must be an integer of at least 1, got l"),
    "mode": ({"mode": "serve"}, ValueError, "mode must be one of train, forward, generate"),
    "variant": ({"variants": ("fast",)}, ValueError, 'variants must be "eager" or parts of'),
    "format": ({"variants": ("quantized:int3",)}, ValueError, "sweep: variants: .*format must be"),
    "static": ({"variants": ("static",)}, ValueError, '"static" need mode "generate"'),
    "twice": ({"variants": ("eager", "eager")}, ValueError, "variants must differ"),
    "budget": ({"budget_s": 0}, ValueError, "budget_s must be more than 0 seconds, got 0"),
    "fraction": ({"memory_limit": 1.5}, ValueError, "memory_limit must be bytes as an int"),
    "limit": ({"memory_limit": "1 GiB"}, TypeError, "memory_limit must be bytes or a fraction"),
    "tokens": ({"new_tokens": 1}, ValueError, "new_tokens must be an integer of at least 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    given, error, text = BAD[name]
    with pytest.raises(error, match=text):
        fusedops.sweep(tokens, **{"model": nn.Linear(2, 2)} | given)


def test_a_step_that_raises_names_its_point(model):
    with pytest.raises(IndexError) as raised:
        fusedops.sweep(
            lambda batch, length: {
                "input_ids": torch.full((batch, length), WORDS),
                "labels": torch.zeros(batch, length).long(),
            },
            model=model,
            batch=2,
            length=4,
        )
    assert "sweep: batch 2, length 4" in raised.value.__notes__


def test_training_needs_a_loss():
    with pytest.raises(ValueError, match='mode "train" needs a model whose output has a loss'):
        fusedops.sweep(lambda batch, length: torch.randn(batch, 2), model=nn.Linear(2, 2))


def test_the_command_line_generates_with_a_cache(tmp_path, monkeypatch):
    """After the prompt each forward sees one token."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | {"model_type": "llama"}))
    lengths = []
    embed = nn.Embedding.forward

    def forward(self, ids):
        lengths.append(ids.shape[-1])
        return embed(self, ids)

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    command = ["sweep", str(path), "--batch", "1", "--length", "8", "--variants", "eager"]
    assert main([*command, "--mode", "generate", "--new-tokens", "4"]) == 0
    assert lengths[:4] == [8, 1, 1, 1]


def test_the_command_line(tmp_path, capsys, model, monkeypatch):
    monkeypatch.setattr(sampling, "MOST", 20)  # p95 needs as many
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | {"model_type": "llama"}))
    out = tmp_path / "rows.json"
    command = ["sweep", str(path), "--batch", "1,2", "--length", "8", "--p95", "9"]
    assert main([*command, "--json", str(out), "--mode", "forward"]) == 0
    shown = capsys.readouterr().out
    best = Sweep.load(out).best(9)
    assert f"most throughput within 9 s: {best.variant}, batch {best.batch}, length 8\n" in shown
    assert len(Sweep.load(out).rows) == 4
    assert main([*command, "--plot", str(tmp_path / "no" / "out.svg")]) == 1
    assert "sweep: plot must be a file in a folder that exists" in capsys.readouterr().err
    assert main([*command[:-1], "-1"]) == 1
    assert "sweep: p95 must be more than 0 seconds, got -1.0" in capsys.readouterr().err
    assert main([*command, "--plot", str(tmp_path / "out.xyz")]) == 1
    assert "sweep: plot must end with .avif, " in capsys.readouterr().err
    assert main(["sweep", "no-such-model"]) == 1
    assert "fusedops sweep: model must be a folder" in capsys.readouterr().err


def test_bench_remembers_what_it_has_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "COMPARED", ("eager",))
    monkeypatch.setenv("FUSEDOPS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PLAIN | {"model_type": "llama"}))
    words = ["bench", str(path), "--batch", "1", "--length", "8", "--mode", "forward"]
    assert not measured.is_measured(cpu_name()) and main(words) == 0
    assert measured.is_measured(cpu_name()) and "eager" in capsys.readouterr().out
    monkeypatch.setenv("FUSEDOPS_CACHE", str(path))  # no folder
    assert main(words) == 0
    assert "patch will not know that" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_refuses_a_device_that_is_not_there(capsys):
    assert main(["bench", "llama", "--device", "cuda"]) == 1
    message = "fusedops bench: device must be one that torch finds, got cuda\n"
    assert capsys.readouterr().err == message


def test_a_step_is_timed_until_the_device_has_done_it():
    """The clock starts when earlier work is done."""
    seen = []
    taken = modes.timed(
        lambda batch: seen.append(batch), lambda: (seen.append("wait"), sleep(0.01))
    )
    assert taken("batch").seconds > 0.01 and seen == ["wait", "batch", "wait"]
