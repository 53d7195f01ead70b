"""Times small models' training steps, patched and unpatched: `python -m benchmarks step`.

Both models run forward, loss, backward and torch.optim.AdamW(fused=True), on words of the standard
library's source, with the models' own dropout. patch's own verify compares outputs, loss and
gradients before a step is timed. The benchmark also times patched steps that leave out one kind of
site or use fusedops' AdamW, and unpatched steps with torch's default AdamW or torch.compile.
"""

import gc
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import fusedops
from benchmarks.harness import report
from benchmarks.harness.timing import interleaved
from fusedops.demo.training import corpus
from fusedops.measuring.ratios import paired_ratio, spread
from fusedops.patching.core.kinds import SITE_NAMES

BATCH, SEQUENCE, VOCABULARY = 4, 256, 8192
HIDDEN, LAYERS, HEADS = 384, 6, 6
QUICK = 1  # layers; with one sequence, an eighth as long
AT_LEAST = {torch.float32: 2.0, torch.bfloat16: 1.6}
KINDS = [name for name in SITE_NAMES if name != "experts"]  # these models have no experts
EAGER, OURS, WHOLE, COMPILED = "eager", "fusedops", "fusedops and its AdamW", "torch.compile"
DEFAULT = "eager, default AdamW"  # torch.optim.AdamW as it comes: not its fused form


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(intermediate_size=1024, **_sizes(layers)))


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_layer": layers, "n_head": HEADS, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bert(layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(intermediate_size=4 * HIDDEN, **_sizes(layers)))


def t5(layers: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": HIDDEN, "d_ff": 1024, "num_heads": HEADS, "vocab_size": VOCABULARY}
    extra = {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
    config = T5Config(num_layers=layers, **extra, **sizes)
    return T5ForConditionalGeneration(config)


def _sizes(layers: int) -> dict[str, int]:
    return {
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
    }


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5}


@dataclass(frozen=True)
class Contender:
    """How a model is prepared, and its parameters' optimizer."""

    ready: Callable[[nn.Module, Tensor], nn.Module]
    optimizer: Callable = field(default=lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True))


def measure(args: Namespace) -> int:
    """Times every model and writes `args.json`. Returns the exit status."""
    rows, goals = [], []
    for name, make in MODELS.items():
        for dtype, asked in AT_LEAST.items():
            kind = str(dtype).removeprefix("torch.")
            ids = words(QUICK, SEQUENCE // 8) if args.quick else words(BATCH, SEQUENCE)
            title = f"training step of {name} {kind} {list(ids.shape)}, {args.allocator} allocator"
            steps, skipped = _steps(make, dtype, ids, args)
            seconds = interleaved({n: (s, nullcontext) for n, s in steps.items()}, args.seconds)
            ratio = paired_ratio(seconds[EAGER], seconds[OURS])
            goals.append(report.goal(title, "over eager", asked, ratio))
            rows += [_row(title, contender, seconds, ids.numel()) for contender in seconds]
            rows += [{"title": title, "contender": n, "skipped": why} for n, why in skipped.items()]
            print("\n".join([title, *_shown(seconds, skipped)]), flush=True)
            del steps
            gc.collect()
    report.save(args, rows, goals)
    return 0


def words(batch: int, length: int) -> Tensor:
    """int64 [batch, length] of the standard library's source.

    A word's number is its rank. Words outside the VOCABULARY most frequent ones are 3, the smallest
    number.
    """
    text = re.findall(r"\w+|\S", corpus().to(torch.uint8).numpy().tobytes().decode("utf-8"))
    ids = {w: 4 + i for i, (w, _) in enumerate(Counter(text).most_common(VOCABULARY - 4))}
    apart = len(text) // batch
    parts = [text[i * apart : i * apart + length] for i in range(batch)]
    return torch.tensor([[ids.get(word, 3) for word in part] for part in parts])


def contenders(args: Namespace) -> Iterator[tuple[str, Contender]]:
    ours = Contender(lambda model, ids: _patched(model, verify=_batch(ids)))
    yield EAGER, Contender(lambda model, ids: model)
    yield DEFAULT, Contender(lambda model, ids: model, lambda p: torch.optim.AdamW(p, lr=1e-4))
    yield OURS, ours
    fused_optimizer = lambda parameters: fusedops.optim.AdamW(parameters, lr=1e-4)  # noqa: E731
    yield WHOLE, Contender(lambda model, ids: _patched(model), fused_optimizer)
    for kind in KINDS:
        yield f"without {kind}", Contender(lambda model, ids, k=kind: _patched(model, **{k: False}))
    if args.compile:
        yield COMPILED, Contender(lambda model, ids: torch.compile(model))


def _patched(model: nn.Module, **options) -> nn.Module:
    fusedops.patch(model, **options)
    return model


def _batch(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


def _steps(
    make: Callable[[int], nn.Module], dtype: torch.dtype, ids: Tensor, args: Namespace
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Returns each contender's step, and the reasons why some have no step."""
    steps, skipped = {}, {}
    for name, contender in contenders(args):
        torch.manual_seed(0)
        plain = make(QUICK if args.quick else LAYERS).to(dtype).train()
        model = contender.ready(plain, ids)
        steps[name] = step(model, ids, contender.optimizer(plain.parameters()))
        if name == COMPILED:
            try:
                steps[name]()
            except (RuntimeError, TorchDynamoException) as error:
                skipped[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
                del steps[name]
    return steps, skipped


def step(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns a training step that can be repeated."""

    def run() -> None:
        optimizer.zero_grad()
        model(**_batch(ids)).loss.backward()
        optimizer.step()

    return run


def _row(title: str, name: str, seconds: dict[str, list[float]], tokens: int) -> dict:
    row = {"title": title, "contender": name, "rounds": len(seconds[name])}
    row |= report.times(seconds[name]) | {"over_eager": paired_ratio(seconds[EAGER], seconds[name])}
    return row | {"tokens_per_s": tokens / row["median_s"]}


def _shown(seconds: dict[str, list[float]], skipped: dict[str, str]) -> Iterator[str]:
    for name, times in seconds.items():
        median = spread(times).median * 1e3
        yield f"  {name:<24} {median:8.1f} ms, {paired_ratio(seconds[EAGER], times)} over eager"
    yield from (f"  {name:<24} skipped: {why}" for name, why in skipped.items())
