"""The profiler's advice as a function of synthetic measurements."""

from dataclasses import replace

import pytest

from fusedops.profiling.advice.rules import LARGE, advise
from fusedops.profiling.evidence import Loader, Patching, SiteTime, Tokens
from fusedops.profiling.judge import judge
from profiling.synthetic import MS, gather, gpu_step, matmul, op, run, step, stream, tiny

SLOW = Loader(batches_per_s=25.0, functions={"collate (data.py:41)": 0.8})

MIB = 2**20

MEMORY = {"peak": 100 * MIB, "activations": 50 * MIB, "logits": 12 * MIB}

MEMORY |= {"optimizer_state": 30 * MIB}


def advice(evidence):
    return {tip.id: tip for tip in advise(evidence, judge(evidence))}


def seconds(evidence, name):
    return advice(evidence)[name].predicted.seconds


def recomputed(**changes):
    return step(matmul(10 * MS), **({"memory": MEMORY, "about": {"blocks": 2}} | changes))


def test_workers_hide_the_loader_up_to_its_speed():
    """The loader needs 40 ms a batch, the step 10: one more worker is still the bound."""
    waits = step(matmul(10 * MS), wait=40 * MS, loader=SLOW, threads=1, cpus=2.0)
    assert seconds(waits, "workers") == pytest.approx(10 * MS, rel=0.05)
    assert seconds(replace(waits, cpus=9.0), "workers") == pytest.approx(40 * MS, rel=0.05)
    slower = replace(waits, cpus=9.0, loader=replace(SLOW, batches_per_s=30.0))
    assert "num_workers=4 " in advice(slower)["workers"].title
    assert "num_workers=1 " in advice(replace(slower, cpus=2.0))["workers"].title
    assert "workers" not in advice(replace(waits, cpus=1.0))
    assert "workers" not in advice(replace(waits, loader=replace(SLOW, asynchronous=True)))
    assert "workers" not in advice(step(matmul(10 * MS), loader=SLOW))


def test_workers_feed_a_step_that_fetches_several_batches():
    """Each of its 4 batches takes the loader 25 ms, so two workers need 50 ms a step."""
    loader = replace(SLOW, batches_per_s=40.0, batches=4.0)
    waits = step(matmul(10 * MS), wait=100 * MS, loader=loader, threads=1, cpus=3.0)
    assert seconds(waits, "workers") == pytest.approx(60 * MS, rel=0.05)
    assert "num_workers=8 " in advice(replace(waits, cpus=9.0))["workers"].title
    assert any(
        "gives 40 batches/s, the step alone takes 4" in line for line in judge(waits).evidence
    )


def test_a_slow_loader_gets_workers_where_arithmetic_takes_longer():
    """It waits for 12 % of the step: more than the threshold, and far less than the arithmetic."""
    evidence = step(matmul(44 * MS, 1.0), wait=6 * MS, loader=SLOW)
    assert judge(evidence).bounds == ("compute",) and "workers" in advice(evidence)
    assert "workers" not in advice(step(matmul(48 * MS, 1.0), wait=2 * MS, loader=SLOW))


def test_workers_need_a_cpu_that_is_free():
    """Other programs that hold up the step would hold up a worker too."""
    for preempted, free in ((1 * MS, True), (20 * MS, False)):
        held_up = run(10 * MS, wait=40 * MS, preempted=preempted)
        waits = step(matmul(10 * MS), plain=held_up, loader=SLOW)
        assert ("workers" in advice(waits)) == free


def test_collate_is_its_share_of_the_wait():
    waits = step(matmul(10 * MS), wait=40 * MS, loader=SLOW)
    assert seconds(waits, "collate") == pytest.approx(32 * MS, rel=0.05)
    assert "data.py:41" in advice(waits)["collate"].why
    held_up = replace(waits, plain=run(10 * MS, wait=40 * MS, preempted=20 * MS))
    assert seconds(held_up, "collate") == pytest.approx(16 * MS, rel=0.05)


@pytest.mark.parametrize("elasticity", [None, 0.0, 0.5, 1.0])
def test_padding_saves_what_scales_with_the_batch(elasticity):
    """Without a measured elasticity, all of the padding's time."""
    padded = Tokens(real=64.0, padded=100.0, samples=4)
    evidence = step(matmul(10 * MS), tokens=padded, elasticity=elasticity)
    saved = 10 * MS * (1 - 0.64 ** (1.0 if elasticity is None else elasticity))
    assert seconds(evidence, "padding") == pytest.approx(saved, rel=0.05, abs=0.2 * MS)
    assert advice(evidence)["padding"].formula.startswith("T of forward and backward x ")
    assert "padding" not in advice(replace(evidence, tokens=Tokens(90.0, 100.0, 4)))


def test_page_faults():
    faults = run(20 * MS, seed=1, user=0.2, system=0.2, faults=400_000)
    evidence = step(stream(20 * MS, 0.3), cached=faults)
    assert seconds(evidence, "keep_freed_memory") == pytest.approx(10 * MS, rel=0.05)
    on_gpu = gpu_step(busy=0.6, mallocs=40, malloc_seconds=3 * MS)
    assert judge(on_gpu).bounds == ("allocation",) and "keep_freed_memory" not in advice(on_gpu)
    assert "keep_freed_memory" not in advice(step(stream(20 * MS)))


def test_threads():
    evidence = step(matmul(20 * MS), fewer_threads=run(8 * MS, seed=3), threads=8)
    assert seconds(evidence, "threads") == pytest.approx(12 * MS, rel=0.05)


def test_threads_of_a_loop_save_at_most_their_wait():
    """No step of a loop ran with fewer threads; its threads wait 12 of 20 ms."""
    waits = run(20 * MS, stopped=12 * MS)
    evidence = step(matmul(8 * MS), plain=waits, cached=None, threads=8, recorded=True)
    tip = advice(evidence)["threads"]
    assert tip.predicted.seconds == pytest.approx(12 * MS, rel=0.05)
    assert tip.formula.startswith("at most: ")


def test_launch_bound_steps_get_a_batch_and_a_compiler():
    evidence = step(tiny(10 * MS), elasticity=0.0, memory=MEMORY)
    assert advice(evidence)["batch"].predicted.bytes == -62 * MIB
    assert seconds(evidence, "batch") == pytest.approx(5 * MS, rel=0.05)
    assert seconds(evidence, "compile") == pytest.approx(10 * MS, rel=0.05)
    faster = step(tiny(10 * MS), elasticity=-0.5)  # half the batch takes longer
    assert seconds(faster, "batch") == pytest.approx(5 * MS, rel=0.05)
    assert not {"batch", "compile"} & set(advice(step(matmul(10 * MS), elasticity=1.0)))


def test_few_samples_of_a_loop_get_a_larger_batch():
    """Calls, the optimizer and slow products are 7 ms of 14; half of that is saved at most."""
    steps = run(14 * MS)
    steps = replace(steps, optimizer=(2 * MS,) * len(steps.seconds))
    ops = matmul(8 * MS, 0.5), tiny(1 * MS), gather(3 * MS), op("the optimizer's step", 2 * MS)
    small = step(*ops, plain=steps, cached=None, recorded=True, tokens=Tokens(samples=2))
    assert seconds(small, "batch") == pytest.approx(3.5 * MS, rel=0.05)
    tip = advice(small)["batch"]
    assert "50% of a step of 2 samples" in tip.why and tip.formula.startswith("at most, ")
    large = step(matmul(10 * MS, 0.9), gather(3 * MS), tokens=Tokens(samples=2), recorded=True)
    assert "batch" not in advice(large)
    assert "batch" not in advice(replace(large, tokens=Tokens(samples=1)))
    slower = step(matmul(10 * MS, 0.75), gather(3 * MS), tokens=Tokens(samples=2), recorded=True)
    assert "batch" not in advice(slower)
    assert "batch" in advice(replace(slower, tokens=Tokens(samples=1)))
    assert "batch" not in advice(replace(small, tokens=Tokens()))
    waits = replace(small, plain=replace(run(28 * MS, stopped=14 * MS), optimizer=steps.optimizer))
    assert "batch" in advice(waits) and "batch" not in advice(replace(waits, threads=8))


def test_a_loops_step_is_its_own_one_after_experiments_too():
    """Its evaluations are part of it, and of the table of operators, but not of kept batches."""
    steps = run(20 * MS)
    steps = replace(steps, optimizer=(4 * MS,) * len(steps.seconds))
    evidence = step(matmul(20 * MS), plain=steps, cached=run(10 * MS), recorded=True)
    assert "float32 products take 100%" in advice(evidence)["bf16"].why
    padded = replace(evidence, tokens=Tokens(50.0, 100.0, 4))
    assert seconds(padded, "padding") == pytest.approx(8 * MS, rel=0.05)


def test_without_casts_of_compiled_code_bf16_is_predicted_at_most():
    whole = replace(matmul(10 * MS, 1.0), shapes="")
    assert advice(step(whole, recorded=True))["bf16"].formula.startswith("at most, ")
    seen = advice(step(matmul(10 * MS, 1.0), recorded=True))["bf16"]
    assert not seen.formula.startswith("at most")


def test_frozen_weights_are_quantized():
    about = {"parameter_bytes": 4000, "frozen_bytes": 3200, "frozen_elements": 800}
    assert advice(step(matmul(10 * MS), about=about))["quantize_lora"].predicted.bytes == 2750
    assert "quantize_lora" not in advice(step(matmul(10 * MS), about=about | {"frozen_bytes": 9}))


def test_a_step_at_the_peak_gets_none():
    assert set(advice(step(matmul(10 * MS, 1.0), elasticity=1.0))) == {"bf16", "none"}
    assert "none" not in advice(step(gather(10 * MS)))


def test_the_largest_gain_comes_first():
    entries = advise(*(lambda e: (e, judge(e)))(step(matmul(10 * MS), wait=40 * MS, loader=SLOW)))
    assert [tip.id for tip in entries][:2] == ["collate", "workers"]


def test_checkpointing_needs_blocks_and_large_activations():
    few = MEMORY | {"activations": round(LARGE * 100 * MIB) - 1}
    for changes in ({"memory": few}, {"memory": None}, {"about": {"blocks": 0}}):
        assert "checkpoint" not in advice(recomputed(**changes))
    assert "checkpoint" in advice(recomputed(memory=few | {"activations": 40 * MIB}))


def test_checkpointing_costs_a_forward_and_saves_no_more_than_activations():
    tip = advice(recomputed())["checkpoint"]
    assert (tip.predicted.bytes, tip.predicted.seconds) == (50 * MIB, None)
    steps = run(10 * MS)
    steps = replace(steps, forward=(3 * MS,) * len(steps.seconds))
    tip = advice(recomputed(cached=steps))["checkpoint"]
    assert tip.predicted.seconds == pytest.approx(-3 * MS) and "2 blocks" in tip.title


def test_transformers_method_is_the_change_where_there_is_one():
    assert "checkpoint(block" in advice(recomputed())["checkpoint"].how
    about = {"blocks": 2, "checkpointing": "activation_checkpointing_enable"}
    tip = advice(recomputed(about=about))["checkpoint"]
    assert tip.how == "model.activation_checkpointing_enable()"


def site(kind, before, after, size=0):
    return SiteTime(kind, "Head", "[8, 8]", 1, (before,) * 4, (after,) * 4, size)


def test_the_loss_alone_where_logits_are_among_the_largest_activations():
    timed = (site("loss", 5 * MS, 3 * MS, 9 * MIB), site("norm", 2 * MS, 1 * MS, 4 * MIB))
    case = recomputed(
        patching=Patching({"loss": 1, "norm": 4}, timed),
        activations={"layers.0": 20 * MIB, "layers.1": 13 * MIB, "layers.2": 11 * MIB},
    )
    tip = advice(case)["loss"]
    assert (tip.predicted.seconds, tip.predicted.bytes) == (pytest.approx(2 * MS), 9 * MIB)
    assert "norm=False" in tip.how and "loss=" not in tip.how
    larger = case.activations | {"head": 14 * MIB}
    assert "loss" not in advice(replace(case, activations=larger))
    assert "loss" not in advice(replace(case, patching=Patching({"norm": 4}, timed[1:])))
    assert "loss" not in advice(replace(case, memory=MEMORY | {"logits": 0}))
    untimed = replace(case, patching=Patching({"loss": 1}))
    assert advice(untimed)["loss"].predicted is None


def test_state_goes_to_the_host_only_from_a_gpu():
    on_gpu = replace(gpu_step(), memory=MEMORY)
    assert advice(on_gpu)["offload"].predicted.bytes == 30 * MIB
    assert "offload" not in advice(replace(on_gpu, memory=MEMORY | {"optimizer_state": 29 * MIB}))
    assert "offload" not in advice(recomputed())


def test_zero_divides_the_state_among_ranks_that_there_are():
    steps = run(10 * MS)
    steps = replace(steps, optimizer=(4 * MS,) * len(steps.seconds))
    tip = advice(recomputed(processes=4, cached=steps))["zero"]
    assert tip.predicted.bytes == round(0.75 * 30 * MIB)
    assert tip.predicted.seconds == pytest.approx(3 * MS)
    gpus = replace(gpu_step(), memory=MEMORY, about={"gpus": 2})
    tip = advice(gpus)["zero"]
    assert (tip.predicted.seconds, tip.predicted.bytes) == (None, 15 * MIB)
    for none in (
        recomputed(),
        recomputed(processes=4, about={"sharded": True}),
        recomputed(processes=4, memory=MEMORY | {"optimizer_state": 29 * MIB}),
        replace(gpus, about={"gpus": 1}),
    ):
        assert "zero" not in advice(none)
