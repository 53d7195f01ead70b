"""The benchmark harness refuses wrong kernels and reports correctly, on toy kernels."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.__main__ import parse
from benchmarks.harness import memory, report, suites, timing, worker
from benchmarks.harness.case import BACKWARD, FORWARD, TRAINING, Case, Contender, Operation, Skip
from benchmarks.harness.expected import Answers, fault
from benchmarks.harness.goals import Goal, table
from benchmarks.harness.run import COPY, Result, run_case
from benchmarks.harness.timing import CPU
from fusedops.measuring.ratios import paired_ratio

BUDGET_S = 0.05


def double(x):
    return x + x


def toy_inputs(shape, dtype, device):
    return (torch.randn(*shape, dtype=dtype, device=device, requires_grad=True),)


def toy(**contenders):
    """Returns an operation, y = 2 x, with contenders given as functions of x."""
    rows = {name: Contender(partial(partial, run)) for name, run in contenders.items()}
    return Operation("double", toy_inputs, double, lambda mode, x: 2 * x.nbytes, rows)


def run(operation, mode=FORWARD, shape=(64, 128), dtype=torch.float32):
    return run_case(Case(operation, mode, dtype, shape), BUDGET_S, CPU)


def skip_an_element(x):
    y = double(x)
    return torch.cat([y[:, :-1], y[:, -1:] * 0], 1)


def wrong_gradient(x):
    return double(x.detach()) + 0 * x


def not_a_number(x):
    return torch.where(torch.arange(x.shape[-1]) == 3, torch.nan, double(x))


def other_dtype(x):
    return double(x).double()


def one_more_output(x):
    return double(x), x


def unwritten_element(x):
    y = torch.empty_like(x)
    y[:, 1:] = double(x)[:, 1:]
    return y


def raises(x):
    raise RuntimeError("no kernel for this")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (skip_an_element, "norm of the error"),
        (not_a_number, "NaN where"),
        (unwritten_element, "NaN where"),
        (other_dtype, "torch.float64"),
        (one_more_output, "2 results instead of 1"),
        (raises, "no kernel for this"),
    ],
)
def test_wrong_kernel_is_refused(kernel, reason):
    result = run(toy(eager=double, fusedops=kernel))
    assert reason in result.refused["fusedops"]
    assert set(result.seconds) == {"copy", "eager"}
    assert result.wrong()


def test_wrong_gradient_is_refused_where_it_is_timed():
    operation = toy(eager=double, fusedops=wrong_gradient)
    assert not run(operation, FORWARD).refused
    for mode in (BACKWARD, TRAINING):
        assert "gradient 0: max norm of the error" in run(operation, mode).refused["fusedops"]


def test_row_that_does_not_fit_into_memory_is_skipped_and_the_run_goes_on():
    def too_large(x):
        raise torch.OutOfMemoryError("Tried to allocate 64 GiB\nand more")

    operation = replace(toy(eager=double, fusedops=double), reference=too_large)
    result = run(operation)
    reason = "too little memory for the row: Tried to allocate 64 GiB"
    assert result.skipped == {"eager": reason, "fusedops": reason}
    assert not result.seconds and not result.wrong()
    assert {row["status"] for row in report.rows(result, "default")} == {"skipped"}


def test_one_wrong_row_among_large_ones_is_refused():
    # In the norms of the whole output the small row drowns; in its own it does not.
    scale = torch.ones(64, 1)
    scale[5] = 1e-9
    wrong = torch.ones(64, 1)
    wrong[5] = 1.5
    operation = toy(eager=lambda x: x * scale, fusedops=lambda x: x * scale * wrong)
    operation = replace(operation, reference=lambda x: x * scale.to(x.dtype))
    assert "of 64 rows" in run(operation).refused["fusedops"]


def product(grad, x, chains):
    """grad.T @ x in float32, each term added to one of so many chains, and these at the end."""
    sums = []
    for first in range(chains):
        total = torch.zeros(grad.shape[1], x.shape[1], dtype=x.dtype)
        for g, row in zip(grad[first::chains], x[first::chains], strict=True):
            total = torch.addr(total.double(), g.double(), row.double()).to(x.dtype)  # one rounding
        sums.append(total)
    return sum(sums[1:], sums[0])


def products(spoil=lambda result: result):
    """Returns a kernel of one chain and `spoil`, beside lines of two."""

    def inputs(shape, dtype, device):
        return tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(2))

    def one_chain(grad, x):
        return spoil(product(grad, x, 1))

    contenders = {"eager": Contender(lambda *t: partial(product, *t, 2))}
    contenders["fusedops"] = Contender(lambda *t: partial(one_chain, *t))
    return Operation("product", inputs, partial(product, chains=2), lambda *_: 8, contenders)


def judged(operation):
    """Returns the verdict from one draw, and from a whole run."""
    torch.manual_seed(0)
    inputs = operation.inputs((64, 512), torch.float32, CPU.device)
    answers = Answers(operation.reference, FORWARD, inputs)
    once = fault([answers.errors(operation.contenders["fusedops"].prepare(*inputs))])
    return once, run(operation, shape=(64, 512)).refused.get("fusedops")


def test_another_order_of_sums_is_luck_in_one_draw_and_right_in_the_mean():
    once, refused = judged(products())
    assert "max norm of the error" in once and "of 512 rows" in once and refused is None


def test_what_errs_too_much_is_refused():
    """A row whose error is twice what it should be, and an element of the first draw alone, far
    off or by six times eager's error."""

    def doubled(result):
        exact = result.double()
        result[7] += (exact[7].abs().max() * 1e-6).to(result)
        return result

    calls = []

    def first(result):
        calls.append(1)
        if len(calls) <= 2:  # the calls of both judges on their first draw
            result[3, 4] += 1
        return result

    def sixfold(result):
        calls.append(1)
        if len(calls) <= 2:
            result[3, 4] += 2e-5  # eager's largest errors are 2e-6 to 4e-6
        return result

    for spoil in (doubled, first, sixfold):
        calls.clear()
        assert "norm of the error" in judged(products(spoil))[1]


def test_a_refused_row_does_not_end_the_run(monkeypatch, tmp_path):
    """The others are timed and written, and the exit status is 1."""
    operations = [toy(eager=double, fusedops=kernel) for kernel in (skip_an_element, double)]
    rows = [Case(operation, FORWARD, torch.float32, (8, 128)) for operation in operations]
    monkeypatch.setattr(suites, "launch", lambda quick, families: rows)
    path = tmp_path / "rows.json"
    args = parse(["launch", "--quick", "--worker", "--seconds", "0.02", "--json", str(path)])
    assert worker.measure(args) == 1
    statuses = [(row["contender"], row["status"]) for row in json.loads(path.read_text())["rows"]]
    timed = [("eager", "timed"), ("fusedops", "timed")]
    assert statuses == [("eager", "timed"), ("fusedops", "refused"), *timed]


def test_inexact_peer_is_timed_and_named():
    result = run(toy(eager=double, peer=skip_an_element, fusedops=double))
    assert "norm of the error" in result.inexact["peer"]
    assert set(result.seconds) == {"copy", "eager", "peer", "fusedops"}
    assert not result.wrong()


def test_contender_that_cannot_run_says_why():
    def nowhere(x):
        raise Skip("no such machine")

    operation = toy(eager=double)
    operation.contenders["absent"] = Contender(nowhere)
    result = run(operation)
    assert result.skipped == {"absent": "no such machine"}
    assert "absent" in report.text(report.rows(result, "default"))


class Machine:
    """A clock that only work moves, three times as slowly whenever the neighbours are busy."""

    now = 0.0

    def work(self, seconds):
        busy = int(self.now * 7) % 2
        self.now += seconds * (3 if busy else 1)

    def contenders(self, **costs):
        return {name: (partial(self.work, cost), nullcontext) for name, cost in costs.items()}


def test_noise_of_the_machine_divides_out(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(timing, "perf_counter", lambda: machine.now)
    seconds = timing.interleaved(machine.contenders(a=1e-3, same=1e-3, half=5e-4), budget_s=2.0)
    assert max(seconds["a"]) > 2.5 * min(seconds["a"])
    assert paired_ratio(seconds["a"], seconds["same"]).median == pytest.approx(1)
    assert paired_ratio(seconds["a"], seconds["half"]).median == pytest.approx(2)


def test_rows_carry_what_the_json_promises():
    result = run(toy(eager=double, fusedops=double, **{"fusedops wrong": skip_an_element}))
    rows = {row["contender"]: row for row in report.rows(result, "keep")}
    assert set(rows) == {"copy", "eager", "fusedops", "fusedops wrong"}
    ours = json.loads(json.dumps(rows["fusedops"]))
    assert ours["shape"] == [64, 128]
    assert ours["allocator"] == "keep"
    assert ours["bytes"] == 2 * 64 * 128 * 4
    assert ours["p10_s"] <= ours["median_s"] <= ours["p90_s"]
    assert ours["gb_per_s"] == pytest.approx(ours["bytes"] / ours["median_s"] / 1e9)
    assert ours["percent_of_copy"] == pytest.approx(100 * result.ratio(COPY, "fusedops").median)
    assert set(ours["ratio_to_eager"]) == {"median", "low", "high"}
    assert rows["fusedops wrong"]["status"] == "refused"


def test_goal_is_met_missed_or_not_timed():
    operation = toy(eager=double, fusedops=double)
    goals = [
        Goal(operation, FORWARD, torch.float32, (64, 128), "eager", {"default": factor}, copy_share)
        for factor, copy_share in ((3.9, None), (4.1, 0.6))
    ]
    seconds = {"eager": [8.0, 8.0], "fusedops": [2.0, 2.0], COPY: [1.0, 1.0]}
    result = Result(goals[0].case(), 0, seconds)
    verdicts = [v for goal in goals for v in goal.verdicts(result, "default")]
    assert [v["measured"].median for v in verdicts] == [4.0, 4.0, 0.5]
    assert [v["met"] for v in verdicts] == [True, False, False]
    assert table(verdicts).count("NO") == 2
    refused = Result(goals[0].case(), 0, {"eager": [8.0]})
    assert not goals[0].verdicts(refused, "default")[0]["met"]


def loss_of(x, target):
    return x.float().gather(1, target[:, None]).square().mean()


def indexed(shape, dtype, device):
    return (*toy_inputs(shape, dtype, device), torch.arange(shape[0]))


def test_gradient_of_a_loss_is_checked_with_another_than_the_1_it_is_timed_with():
    begun_with = []

    def noted(x, target):
        loss = loss_of(x, target)
        loss.register_hook(lambda grad: begun_with.append(grad.item()))
        return loss

    def forgetful(x, target):
        loss = loss_of(x, target)
        loss.register_hook(torch.ones_like)
        return loss

    operation = toy(**{"fusedops": noted, "fusedops forgetful": forgetful})
    operation = replace(operation, reference=loss_of, bytes_moved=lambda mode, x, _: x.nbytes)
    result = run(replace(operation, inputs=indexed, flops=lambda *_: 8), TRAINING, (8, 16))
    assert "gradient 0" in result.refused["fusedops forgetful"]
    assert begun_with[0] != 1 and set(begun_with[1:]) == {1}
    rows = {row["contender"]: row for row in report.rows(result, "default")}
    ours = rows["fusedops"]
    assert ours["tflop_per_s"] == pytest.approx(8 / ours["median_s"] / 1e12)
    assert "TFLOP/s" in report.text([ours]) and "tflop_per_s" not in rows[COPY]


def test_goal_in_memory_is_met_missed_or_not_measured():
    operation = toy(eager=double, fusedops=double)
    goals = [
        Goal(operation, FORWARD, torch.float32, (8, 8), "eager", {"default": 1.0}, of_memory=share)
        for share in (0.1, 0.05)
    ]
    sizes = {"eager": memory.Memory(1000, 10), "fusedops": memory.Memory(100, 10)}
    result = Result(goals[0].case(), 0, {"eager": [2.0], "fusedops": [1.0]}, memory=sizes)
    verdicts = [goal.verdicts(result, "default")[1] for goal in goals]
    assert [(v["measured"], v["met"]) for v in verdicts] == [(0.1, True), (0.1, False)]
    assert "memory, of eager's" in table(verdicts) and table(verdicts).count("NO") == 1
    rows = {row["contender"]: row for row in report.rows(result, "default")}
    assert (rows["fusedops"]["peak_bytes"], rows["fusedops"]["result_bytes"]) == (100, 10)
    assert "0 MB at most" in report.text([rows["fusedops"]])
    assert len(replace(goals[0], at_least={"keep": 1.0}).verdicts(result, "keep")) == 1
    del sizes["fusedops"]
    assert not goals[0].verdicts(result, "default")[1]["met"]


def test_launch_covers_every_public_operator():
    import fusedops.functional as ours

    names = {case.operation.name for case in suites.launch(quick=True)}
    elsewhere = {"clip_grad_norm_"}  # it works in place: `benchmarks adamw` has it
    elsewhere |= {"QuantizedWeight", "quantize_weight", "dequantize_weight"}  # of no step
    elsewhere |= {"quantize_experts", "dequantize_experts"}
    elsewhere.add("merge_attention")  # calls of torch's functions
    measured = {name.partition(" + ")[0] for name in names}
    assert measured == set(ours.__all__) - elsewhere


def test_every_row_of_the_launch_table_runs():
    for case in suites.launch(quick=True):
        inputs = case.operation.inputs(case.shape, case.dtype, torch.device("cpu"))
        for contender in case.contenders().values():
            with contender.scope():
                contender.prepare(*inputs)()
