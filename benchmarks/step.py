"""A training step of small models, patched against unpatched: `python -m benchmarks step`.

Forward, loss, backward and torch.optim.AdamW(fused=True), in float32 with the models' own dropout,
on both sides alike. patch's own verify has compared outputs, loss and gradients before a step is
timed. What no site covers (attention, the loss, the optimizer) bounds the ratio.
"""

import json
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import fusedops
from benchmarks.timing import CPU, interleaved
from fusedops.measure import environment, paired_ratio, spread

BATCH, SEQUENCE, VOCABULARY = 4, 256, 8192
HIDDEN, LAYERS, HEADS = 384, 6, 6
AT_LEAST = 1.6


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(intermediate_size=1024, **_sizes()))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(intermediate_size=4 * HIDDEN, **_sizes()))


def _sizes() -> dict[str, int]:
    return {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
    }


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}


def measure(args: Namespace) -> int:
    """Times every model and writes `args.json`. The exit status."""
    rows, goals = [], []
    for name, make in MODELS.items():
        seconds = _seconds(make, args.seconds)
        ratio = paired_ratio(seconds["eager"], seconds["fusedops"])
        title = f"training step of {name} float32 [{BATCH}, {SEQUENCE}], {args.allocator} allocator"
        goals.append(
            {
                **{"title": title, "what": "over eager", "asked": AT_LEAST},
                **{"measured": ratio, "met": ratio.median >= AT_LEAST},
            }
        )
        rows += [_row(title, contender, times) for contender, times in seconds.items()]
        print(f"{title}: {ratio} over eager", flush=True)
    document = {"environment": environment(args.threads, CPU.device), "rows": rows, "goals": goals}
    Path(args.json).write_text(json.dumps(document))
    return 0


def _row(title: str, contender: str, times: list[float]) -> dict:
    found, tokens = spread(times), BATCH * SEQUENCE
    row = {"title": title, "contender": contender, "rounds": len(times)}
    row |= {"median_s": found.median, "p10_s": found.p10, "p90_s": found.p90}
    return row | {"tokens_per_s": tokens / found.median}


def _seconds(make: Callable[[], nn.Module], budget_s: float) -> dict[str, list[float]]:
    ids = torch.randint(
        3, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0)
    )
    models = {}
    for name in ("eager", "fusedops"):
        torch.manual_seed(0)
        models[name] = make().train()
    fusedops.patch(models["fusedops"], verify={"input_ids": ids, "labels": ids})
    steps = {name: (_step(model, ids), nullcontext) for name, model in models.items()}
    return interleaved(steps, budget_s)


def _step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step
