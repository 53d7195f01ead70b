"""Compares the savings that `fusedops.profile` predicts for its advice with measured savings.

Small models of four architectures run three kinds of steps: with small batches, with larger ones
and with padded ones. `fusedops.profile` advises, and `Profile.measure` tries what it can. Padding
is measured with the same samples sorted by length and trimmed. A saving of time is given as a share
of the step timed with it, because the machine's speed may change in between. A row is excluded if
it has no prediction or if the measured interval contains 0.

`python -m benchmarks.bottlenecks.advice` measures and writes docs/profile_advice.md.
"""

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import fusedops
from benchmarks.harness import report
from fusedops.measuring.blocks import compare_blocks, fewest_seconds
from fusedops.profiling.advice.advice import Saving, saving
from fusedops.profiling.advice.trial import ALL
from fusedops.profiling.report import Profile

__all__ = ["PAGE", "RESULTS", "Row", "page", "sorted_and_trimmed", "table"]

RESULTS = "docs/profile_advice.json"
PAGE = "docs/profile_advice.md"
HEADER = """# What advice saves: predicted and measured

`python -m benchmarks.bottlenecks.advice` writes this page. `fusedops.profile` predicts what each
advice saves of a step ([profile.md](guides/profile.md#advice)). Blocks of steps with the change and
without it measure the saving. Savings of time are shares of the step; a negative one is a slower
step. Savings of memory are differences of two steps' peaks. A factor is measured over predicted. A
row is excluded if it has no prediction or if the measured interval contains 0.

Models have four layers, hidden size 256 and a vocabulary of 4000. The steps train with torch's
AdamW in float32, on batches of 4 x 64 tokens ("train"), of 8 x 128 tokens ("large": `loss`), and of
4 samples of 8 to 64 tokens ("padded"). `padding` is measured with four batches against the same
samples sorted by length and trimmed; these keep some padding, and the prediction leaves none.

Advice that a report did not give, or that it had no time to try, has no row. This advice has none:

- `batch`, `checkpoint`, `compile` and `collate` say themselves that their saving is an upper bound,
  and the profile itself measures `threads`.
- `workers`: these steps keep their batches in memory. [profile_workloads.md](profile_workloads.md)
  compares its prediction with a measurement on a loop that decodes images.
- `quantize_lora`: these models have no frozen weights. It has no prediction of time.
- `keep_freed_memory`: page faults do not limit these steps. [profile_matrix.md](profile_matrix.md)
  has the verdict on steps that they limit, and no saving.
- `offload` and `zero` need GPUs or several ranks.
"""
PREDICTED = tuple(name for name in ALL if name != "checkpoint")  # whose saving is a bound
VOCABULARY = 4000
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": partial(
        transformers.LlamaConfig, intermediate_size=688, num_key_value_heads=4, **SIZES
    ),
    "bert": partial(transformers.BertConfig, intermediate_size=1024, **SIZES),
    "gpt2": partial(transformers.GPT2Config, n_embd=256, n_layer=4, n_head=8),
    "t5": partial(transformers.T5Config, decoder_start_token_id=0, **T5),
}
HEADS = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
WINDOW = 4  # batches whose samples are sorted by length
SHORTEST = 8  # tokens of a padded sample


@dataclass(frozen=True)
class Row:
    """What one advice saves per step. Savings of time are shares of the step's time.

    step: the step's seconds while the saving was measured. low, high: the measured saving's 95 %
    interval. A value is None if it was not predicted, or not measured.
    """

    model: str
    kind: str
    advice: str
    step: float
    predicted: float | None
    measured: float
    low: float
    high: float
    predicted_bytes: int | None = None
    measured_bytes: int | None = None

    @property
    def judged(self) -> bool:
        """Whether a prediction of time can be compared."""
        return self.predicted is not None and not self.low <= 0 <= self.high

    @property
    def factor(self) -> float | None:
        """Measured over predicted, negative with a wrong sign."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def right(self) -> bool:
        """Whether the prediction is within a factor of 2, with the right sign."""
        return self.factor is not None and 0.5 <= self.factor <= 2


def workload(name: str) -> tuple[nn.Module, Any, Callable[[Any], None]]:
    """A model, its optimizer and its step on tokens, or on a dictionary of its arguments."""
    torch.manual_seed(0)
    config = CONFIGS[name](vocab_size=VOCABULARY)
    config._attn_implementation = "sdpa"
    home = HEADS.get(name, transformers.AutoModelForCausalLM)
    model = home.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor | Mapping[str, Tensor]) -> None:
        arguments = batch if isinstance(batch, Mapping) else {"input_ids": batch, "labels": batch}
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def rows(name: str, kind: str, budget_s: float) -> Iterator[Row]:
    """Profiles a model's steps, and measures what was advised."""
    steps = KINDS_OF_STEPS[kind]
    model, optimizer, step = workload(name)
    data = steps.data(steps.batch, steps.length)
    about = {"data": data, "model": model, "optimizer": optimizer}
    profile = fusedops.profile(step, **about, steps=8, budget_s=budget_s)
    print(name, kind, *profile.verdict.not_checked, sep="\n  ", flush=True)
    longest = 1.5 * fewest_seconds(profile.time.seconds)
    for advised in profile.measurable:
        if advised in steps.tried:
            profile.measure(advised, budget_s=longest)
    padding = kind == "padded" and "padding" in {advised.id for advised in profile.advice}
    measured = {"padding": trimmed(step, data, longest)} if padding else {}
    yield from advice_rows(profile, name, kind, measured)


def advice_rows(
    profile: Profile, name: str, kind: str, measured: Mapping[str, Saving]
) -> Iterator[Row]:
    """A row of each measured advice. measured: what `Profile.measure` cannot try."""
    base = median((profile.evidence.cached or profile.evidence.plain).running)
    for advice in profile.advice:
        saving, predicted = measured.get(advice.id, advice.measured), advice.predicted or Saving()
        if saving is None or saving.interval is None or saving.seconds is None:
            continue
        assert saving.step is not None
        share = None if predicted.seconds is None else predicted.seconds / base
        shares = (value / saving.step for value in (saving.seconds, *saving.interval))
        yield Row(name, kind, advice.id, saving.step, share, *shares, predicted.bytes, saving.bytes)


def plain_data(batch: int, length: int) -> list[Any]:
    return [torch.randint(0, VOCABULARY, (batch, length)) for _ in range(40)]


def padded_data(batch: int, length: int) -> list[dict[str, Tensor]]:
    """Batches with samples of random lengths, each as long as its longest sample."""
    random = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(40):
        lengths = torch.randint(SHORTEST, length + 1, (batch,), generator=random)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        ids = torch.randint(1, VOCABULARY, mask.shape, generator=random) * mask
        labels = ids.masked_fill(mask == 0, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def sorted_and_trimmed(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The same samples in batches of similar lengths."""
    size = len(batches[0]["input_ids"])
    samples = [
        {key: value[i][: int(item["attention_mask"][i].sum())] for key, value in item.items()}
        for item in batches
        for i in range(size)
    ]
    samples.sort(key=lambda sample: len(sample["input_ids"]))
    groups = [samples[i : i + size] for i in range(0, len(samples), size)]
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return [
        {
            key: torch.nn.utils.rnn.pad_sequence([item[key] for item in group], True, value)
            for key, value in fill.items()
        }
        for group in groups
    ]


def trimmed(step: Callable[[Any], None], data: list[dict[str, Tensor]], budget_s: float) -> Saving:
    """What a step saves if batches have similar lengths: blocks of a window of batches."""
    batches = {False: data[:WINDOW], True: sorted_and_trimmed(data[:WINDOW])}
    similar = False

    @contextmanager
    def change() -> Iterator[None]:
        nonlocal similar
        similar = True
        yield
        similar = False

    def call() -> None:
        for batch in batches[similar]:
            step(batch)

    whole = saving(*compare_blocks(call, change, WINDOW * budget_s))
    assert whole.seconds is not None and whole.interval is not None and whole.step is not None
    low, high = whole.interval
    interval = low / WINDOW, high / WINDOW
    return Saving(whole.seconds / WINDOW, None, interval, whole.step / WINDOW)


@dataclass(frozen=True)
class Steps:
    """A kind of steps: its size, its data, and the advice that `Profile.measure` tries."""

    batch: int
    length: int
    data: Callable[[int, int], list[Any]]
    tried: Container[str] = PREDICTED


KINDS_OF_STEPS = {
    "train": Steps(4, 64, plain_data),
    "large": Steps(8, 128, plain_data, ("loss",)),
    "padded": Steps(4, 64, padded_data, ()),
}


def table(rows: list[Row]) -> Iterator[str]:
    yield "| model | step | advice | ms | predicted | measured (95 %) | factor | MiB | measured |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in rows:
        predicted = "-" if r.predicted is None else f"{r.predicted:.1%}"
        factor = f"{r.factor or 0:.2f}" if r.judged else "excluded"
        measured = f"{r.measured:.1%} ({r.low:.1%}..{r.high:.1%})"
        sizes = f"{_mib(r.predicted_bytes)} | {_mib(r.measured_bytes)}"
        cells = f"{r.step * 1e3:.0f} | {predicted} | {measured} | {factor} | {sizes}"
        yield f"| {r.model} | {r.kind} | {r.advice} | {cells} |"
    yield ""
    yield from _summary(rows)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _summary(rows: list[Row]) -> Iterator[str]:
    judged = [r for r in rows if r.judged]
    signs = sum((r.predicted or 0) * r.measured > 0 for r in judged)
    right = sum(r.right for r in judged)
    yield f"{len(rows) - len(judged)} of {len(rows)} rows are excluded. Of the {len(judged)}"
    yield f"others, the sign is right in {signs}, and the factor is at most 2 in {right}."
    yield ""
    yield "| advice | rows | excluded | sign right | within a factor of 2 |"
    yield "| --- | --- | --- | --- | --- |"
    for name, count in Counter(r.advice for r in rows).items():
        group = [r for r in judged if r.advice == name]
        signs = sum((r.predicted or 0) * r.measured > 0 for r in group)
        right = sum(r.right for r in group)
        yield f"| {name} | {count} | {count - len(group)} | {signs} | {right} |"


def page(document: dict[str, Any]) -> str:
    """docs/profile_advice.md, from a document of results."""
    machine, load = document["environment"], document["load"]
    busy = f"load {load['low']:.1f} to {load['high']:.1f} on {load['cpus']} CPUs"
    where = f"{machine['device']}, {machine['threads']} thread, torch {machine['torch']}"
    lines = table([Row(**values) for values in document["rows"]])
    return "\n".join((HEADER, f"{where}, {machine['date'][:10]}; {busy}.", "", *lines, ""))


def measure(args: argparse.Namespace) -> None:
    """Measures every model's steps, and writes the results."""
    measured, loads = [], []
    for kind in KINDS_OF_STEPS:
        for name in CONFIGS:
            measured += rows(name, kind, args.budget)
            loads.append(os.getloadavg()[0])
            print(*table(measured), sep="\n", flush=True)
    load = {"low": min(loads), "high": max(loads), "cpus": os.cpu_count()}
    report.save(args, [asdict(row) for row in measured], [], load=load)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bottlenecks.advice")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of a profile")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-write", action="store_true", help="write the page from the results")
    parser.set_defaults(json=RESULTS)
    args = parser.parse_args()
    if not args.only_write:
        torch.set_num_threads(args.threads)
        transformers.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        measure(args)
    Path(PAGE).write_text(page(json.loads(Path(RESULTS).read_text())))


if __name__ == "__main__":
    main()
