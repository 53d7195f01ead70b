"""The profiler's prediction of what patch would save, from timed calls to the advice."""

import inspect
import json
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fusedops
from fusedops.measuring.changes import ONLY_LOSS
from fusedops.patching.core.swap import fused_modules
from fusedops.profiling.advice.patches import by_kind
from fusedops.profiling.advice.rules import advise
from fusedops.profiling.collect.pieces import FEWEST, ROUNDS
from fusedops.profiling.collect.sites import UNSEEN, time_sites
from fusedops.profiling.evidence import Evidence, Patching, SiteTime
from fusedops.profiling.judge import judge
from profiling.cases import everything, same
from profiling.synthetic import MS, matmul, step

LAYERS, BATCH, LENGTH, WIDE, HEADS = 2, 2, 16, 96, 4
SIZES = {"hidden_size": 64, "intermediate_size": WIDE, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "vocab_size": 128}


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **more)
    return transformers.LlamaForCausalLM(config), torch.randint(128, (BATCH, LENGTH))


def timed(model, call, seconds=0.0):
    """Few rounds by default, which is enough for what is counted."""
    times, reason = time_sites(model, call, perf_counter() + seconds)
    assert not reason and not fused_modules(model)
    return times


def calls(times):
    counts = Counter()
    for site in times.timed:
        counts[site.kind] += site.calls
    return counts


def size_of(times, kind):
    return sum(site.bytes for site in times.timed if site.kind == kind)


def test_all_calls_of_a_step_are_timed_as_counts_sees_them(any_size):
    model, ids = llama()
    times = timed(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    with fusedops.patched(model) as report:
        counts = report.counts({"input_ids": ids, "labels": ids})
        assert times.sites == {kind: n for kind, (n, _) in report.coverage.items()}
    kernels = Counter()
    for site in counts.sites:
        kernels[site.kind] += site.kernel
    assert calls(times) == +kernels and times.left == 0
    for site in times.timed:
        assert FEWEST <= len(site.before) == len(site.after) <= ROUNDS
        assert min(*site.before, *site.after) > 0
    shapes = Counter(site.name for site in times.timed if site.kind == "linear")
    assert shapes == {"Linear": 4}  # q and o, k and v, gate and up, down


def test_calls_that_would_run_torchs_code_are_left_out():
    model, ids = llama()
    times = timed(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert times.left == LAYERS and "attention" not in calls(times)


def test_kept_bytes_are_exact(any_size):
    """A gated product no longer keeps the activation; eager attention no longer keeps its scores.

    transformers' eager function keeps the mask's sum, the probabilities and repeated keys.
    """
    model, ids = llama(attn_implementation="eager")
    times = timed(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    rows = BATCH * LENGTH
    assert size_of(times, "mlp") == LAYERS * rows * WIDE * 4
    scores = LAYERS * BATCH * HEADS * LENGTH**2 * 4
    assert size_of(times, "attention") >= scores
    assert size_of(times, "rotary") == 0


def test_the_loss_no_longer_has_logits():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"vocab_size": 1024}))
    ids = torch.randint(128, (2, 256))
    times = timed(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert size_of(times, "loss") >= ids.numel() * 1024 * 4


def test_bytes_count_one_of_two_accumulated_forwards(any_size):
    model, ids = llama()

    def twice():
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()

    times = timed(model, twice)
    assert calls(times)["mlp"] == 2 * LAYERS
    assert size_of(times, "mlp") == LAYERS * BATCH * LENGTH * WIDE * 4


def test_two_forwards_before_a_backward_keep_both(any_size):
    model, ids = llama()
    times = timed(model, lambda: sum(model(ids, labels=ids).loss for _ in range(2)).backward())
    assert size_of(times, "mlp") == 2 * LAYERS * BATCH * LENGTH * WIDE * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_keeps_nothing_but_takes_its_time_twice(reentrant, any_size):
    model, ids = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the name is deprecated
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    times = timed(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    assert calls(times)["mlp"] == 2 * LAYERS and size_of(times, "mlp") == 0


def test_a_step_without_gradients_keeps_nothing(any_size):
    model, ids = llama()

    def forward():
        with torch.no_grad():
            model(input_ids=ids)

    times = timed(model, forward)
    assert calls(times)["linear"] == 7 * LAYERS + 1 and "loss" not in calls(times)
    assert {site.bytes for site in times.timed} == {0}


def test_autocast_is_repeated(any_size):
    """In the step the gated product gets bfloat16; repeated without autocast it would be slow."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    seen = []

    class Spy(nn.LayerNorm):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    model[0] = Spy(8)

    def call():
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 8))

    timed(model, call)
    assert len(seen) > 2 * FEWEST and all(seen)


class SlowNorm(nn.LayerNorm):
    """A layer norm whose call takes 3 ms more than it needs."""

    def forward(self, x):
        time.sleep(3 * MS)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def test_a_saving_is_calls_times_the_difference():
    model = nn.Sequential(*(SlowNorm(64) for _ in range(3)))
    x = torch.randn(8, 64, requires_grad=True)
    times = timed(model, lambda: model(x).sum().backward(), seconds=20.0)
    (call,) = times.timed
    assert (call.kind, call.name, call.shapes, call.calls) == ("norm", "SlowNorm", "[8, 64]", 3)
    seconds = by_kind(times)["norm"].seconds
    assert 8 * MS < seconds < 18 * MS  # a busy machine wakes a sleeper late
    evidence = replace(step(matmul(40 * MS)), patching=times)
    (advice,) = [a for a in advise(evidence, judge(evidence)) if a.id == "patch"]
    assert advice.predicted.seconds == pytest.approx(seconds)


def test_everything_is_put_back():
    """Only the timed step itself trains; `restore=True` undoes that too."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout())
    data = [torch.randn(8, 64)] * 20
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    classes = [type(module) for module in model.modules()]
    before = everything(model, optimizer)
    options = {"data": data, "model": model, "optimizer": optimizer, "steps": 5, "warmup": 1}
    report = fusedops.profile(train, **options, budget_s=20.0)
    assert report.evidence.patching.timed
    assert same(before, everything(model, optimizer))
    assert [type(module) for module in model.modules()] == classes
    assert not any(vars(module).get("_fusedops") for module in model.modules())


def test_real_steps_are_not_undone_but_the_patched_one_is():
    model, taken = nn.Sequential(nn.LayerNorm(8)), []

    def train(x):
        with torch.no_grad():
            model[0].weight.add_(1)
        taken.append(len(fused_modules(model)))
        model(x)

    options = {"data": [torch.randn(4, 8)] * 20, "model": model, "steps": 5, "warmup": 1}
    report = fusedops.profile(train, **options, restore=False)
    assert report.evidence.patching.timed and taken.count(1) == 1
    assert torch.equal(model[0].weight, torch.full((8,), 1.0 + taken.count(0)))


def test_why_nothing_was_timed():
    model = nn.Sequential(nn.LayerNorm(8))
    late = perf_counter() + 20.0
    assert time_sites(model, lambda: None, late) == (Patching({"norm": 1}), UNSEEN)
    result = time_sites(model, lambda: None, late, "the budget had no time for it")
    assert result == (Patching({"norm": 1}), "the budget had no time for it")
    times, reason = time_sites(model, lambda: model(3), late)
    assert times == Patching({"norm": 1}) and reason.startswith("a patched step raised TypeError: ")
    assert not fused_modules(model)
    with fusedops.patched(model):
        assert time_sites(model, lambda: None, late) == (None, "")
    assert time_sites(nn.Sequential(nn.ReLU()), lambda: None, late) == (None, "")


def test_the_report_says_why_there_is_no_prediction():
    model, data = nn.Sequential(nn.LayerNorm(8)), [torch.randn(4, 8)] * 20
    options = {"data": data, "model": model, "steps": 5, "warmup": 1}
    report = fusedops.profile(lambda x: model(x).sum().backward(), **options, budget_s=1.5)
    (tip,) = [tip for tip in report.advice if tip.id == "patch"]
    assert tip.predicted is None and tip.formula == ""
    assert "saving of patch: the budget had no time for it" in report.verdict.not_checked


# The advice is a function of the evidence.


def site(kind, calls, before, after, size=0):
    return SiteTime(kind, "Module", "[8, 8]", calls, (before,) * 6, (after,) * 6, size)


def patching(*timed, left=0):
    return Patching({"norm": 9, "loss": 1}, timed, left)


def patch_advice(times):
    evidence = replace(step(matmul(40 * MS)), patching=times)
    return [tip for tip in advise(evidence, judge(evidence)) if tip.id == "patch"]


def test_the_advice_for_the_loss_alone_leaves_every_other_kind():
    options = inspect.signature(fusedops.patch).parameters.values()
    kinds = {option.name for option in options if option.default is True}
    assert dict.fromkeys(kinds - {"loss"}, False) == ONLY_LOSS


def test_the_sum_over_calls_by_kind():
    times = patching(
        site("norm", 4, 3 * MS, 1 * MS, 2**20),
        site("norm", 2, 1 * MS, 2 * MS, -(2**19)),
        site("loss", 1, 9 * MS, 1 * MS, 2**22),
        left=3,
    )
    (tip,) = patch_advice(times)
    assert tip.predicted.seconds == pytest.approx(14 * MS)
    assert tip.predicted.bytes == 2**22 + 2**19 and "b l V" in tip.formula
    assert list(by_kind(times)) == ["loss", "norm"]
    assert "it would fuse 9 norm, 1 loss sites: loss -8 ms, -4 MiB; norm -6 ms, -512 KiB" in tip.why
    assert tip.why.endswith("3 calls would run torch's code as before")


def test_one_disturbed_block_does_not_count():
    times = SiteTime("norm", "N", "[8]", 1, (2 * MS,) * 5 + (90 * MS,), (1 * MS,) * 6)
    assert patch_advice(patching(times))[0].predicted.seconds == pytest.approx(1 * MS)


def test_a_slower_patch_is_predicted_and_comes_last():
    (tip,) = patch_advice(patching(site("norm", 2, 1 * MS, 2 * MS)))
    assert tip.predicted.seconds == pytest.approx(-2 * MS) and "norm +2 ms" in tip.why
    evidence = replace(step(matmul(40 * MS)), patching=patching(site("norm", 2, 1 * MS, 2 * MS)))
    assert advise(evidence, judge(evidence))[-1].id == "patch"


def test_without_times_there_is_no_prediction():
    (tip,) = patch_advice(patching())
    assert tip.predicted is None and tip.why == "it would fuse 9 norm, 1 loss sites"
    (tip,) = patch_advice(patching(left=5))
    assert tip.predicted.seconds == tip.predicted.bytes == 0
    assert patch_advice(None) == []


def test_saved_evidence_gives_the_same_advice(tmp_path):
    evidence = replace(
        step(matmul(40 * MS)), patching=patching(site("norm", 4, 3 * MS, 1 * MS, 7), left=1)
    )
    evidence.save(tmp_path / "evidence.json")
    loaded = Evidence.load(tmp_path / "evidence.json")
    assert loaded == evidence
    assert advise(loaded, judge(loaded)) == advise(evidence, judge(evidence))


def test_evidence_from_before_this_field_loads():
    line = (Path(__file__).parent / "recorded" / "compute.jsonl").read_text().splitlines()[0]
    old = json.loads(line)["evidence"]
    assert "patching" not in old
    assert Evidence.from_dict(old).patching is None
