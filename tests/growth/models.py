"""Calls of patched models for memory-growth tests: training, generation, patching, quantization."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable

import torch
from patching.models.attention_models import MODELS, build
from torch import Tensor

import fusedops
from fusedops.testing import backends
from growth.measure import Watch
from growth.subject import Subject, Turns, leaf, nn_module, numbers
from growth.ways import Call, Interruption, interrupt, step

LAYER = {
    "llama": {"num_hidden_layers": 1},
    "bert": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "t5": {"num_layers": 1},
}
WIDTH, TOKENS = 32, 64
LONG_TO_COMPILE = {"compiled": "Inductor takes half a minute"}
LEFT = {"gpt2": LONG_TO_COMPILE, "t5": LONG_TO_COMPILE}


@functools.cache
def _original(name: str) -> torch.nn.Module:
    _, config, sizes, _ = MODELS[name]
    return build(name, config(**sizes | LAYER[name])).train()


def tiny(name: str) -> torch.nn.Module:
    """Returns a one-layer model for training. Copies a cached one, which is faster."""
    return copy.deepcopy(_original(name))


def tokens() -> Tensor:
    return numbers(2, 9, below=TOKENS - 3) + 3


def patched_step(name: str) -> Subject:
    """Returns a patched model's loss. Its input is embeddings, which have a gradient."""

    def loss_of(model):
        return lambda embeddings, labels: model(inputs_embeds=embeddings, labels=labels).loss

    model = tiny(name)
    fusedops.patch(model)
    return nn_module(
        model, lambda: [leaf(2, 9, WIDTH), tokens()], bind=loss_of, left=LEFT.get(name, {})
    )


STEPS = {f"a patched {name}": lambda name=name: patched_step(name) for name in LAYER}


def train(model: torch.nn.Module, watch: Watch, read: bool = False) -> None:
    """Runs one step from token ids to gradients. read: also computes the lazy logits."""
    ids = tokens()
    outputs = model(input_ids=ids, labels=ids)
    watch(ids, outputs.loss, outputs.logits)
    outputs.loss.backward()
    if read:
        watch(outputs.logits + 0)
    model.zero_grad()


def training(name: str) -> Callable[[Watch], Call]:
    def routine(watch):
        model, turns = tiny(name), Turns([False, True])
        fusedops.patch(model)
        return lambda: train(model, watch, turns())

    return routine


def interrupt_from(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a logits processor that raises once a sequence has `length` tokens."""

    def process(ids, scores):
        if ids.shape[1] >= length:
            interrupt()
        return scores

    return process


def generate(name: str, cache: str) -> Callable[[Watch], Call]:
    """Generates three tokens; every second call is interrupted after the first token."""

    def routine(watch):
        model = tiny(name).eval()
        fusedops.patch(model)
        prompt = 1 if model.config.is_encoder_decoder else 9
        turns = Turns([[], [interrupt_from(prompt + 1)]])
        greedy = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}

        def call():
            ids = tokens()
            watch(ids)
            with contextlib.suppress(Interruption):
                watch(model.generate(ids, logits_processor=turns(), **greedy))

        return call

    return routine


def show(model: torch.nn.Module, watch: Watch) -> None:
    watch(*model.parameters(), *model.buffers())


def life(name: str) -> Callable[[Watch], Call]:
    """Makes, patches, trains and drops a model; unpatches every second one first."""

    def routine(watch):
        turns = Turns([False, True])

        def call():
            model = tiny(name)
            show(model, watch)
            fusedops.patch(model)
            train(model, watch)
            if turns():
                fusedops.unpatch(model)
                train(model, watch)

        return call

    return routine


def refused(watch: Watch) -> Call:
    """patch(strict=True) of a model with an unsupported site: it raises and restores the model."""

    def call():
        model = tiny("t5")
        show(model, watch)
        with contextlib.suppress(RuntimeError):
            fusedops.patch(model, strict=True)
            raise AssertionError("strict=True left a site and did not raise")
        train(model, watch)

    return call


class BreakingForward(torch.nn.LayerNorm):
    """A norm whose forward raises `errors[-1]`. The list keeps patch from caching its probe."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.errors: list[type[BaseException]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.errors:
            raise self.errors[-1]
        return super().forward(x)


ERRORS = Interruption, KeyboardInterrupt


def broken_forward(watch: Watch) -> Call:
    """patch runs a norm that raises. Only an interrupt ends patch, which has begun to fuse."""
    norm, turns = BreakingForward(8), Turns(ERRORS)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), norm, torch.nn.Linear(8, 8))

    def call():
        error, ended = turns(), False
        norm.errors.append(error)
        try:
            fusedops.patch(model)
        except ERRORS:
            ended = True
        norm.errors.clear()
        assert ended == (error is KeyboardInterrupt)
        step(nn_module(model, lambda: [leaf(4, 8)]), watch)
        fusedops.unpatch(model)

    return call


def patched_block(watch: Watch) -> Call:
    """`patched()` blocks around one model; every second block raises."""
    model, turns = tiny("llama"), Turns([False, True])

    def call():
        with contextlib.suppress(Interruption), fusedops.patched(model):
            train(model, watch)
            if turns():
                interrupt()

    return call


def quantized(watch: Watch) -> Call:
    """Quantizes, patches and drops a model, in each format by turns."""
    formats = Turns(["int8", "int4", "nf4", "fp8"])

    def call():
        model = tiny("llama")
        show(model, watch)
        fusedops.quantize(model, formats())
        fusedops.patch(model)
        show(model, watch)
        train(model, watch)

    return call


def verified(watch: Watch) -> Call:
    """`verify` of one patched model; every second batch is one that the model refuses."""
    model = tiny("llama").eval()
    fusedops.patch(model)
    turns = Turns([False, True])

    def call():
        ids = tokens()
        wrong = {"labels": ids[:1]} if turns() else {"labels": ids}
        with contextlib.suppress(RuntimeError, ValueError):
            fusedops.verify(model, {"input_ids": ids, **wrong})
        watch(ids)

    return call


def backend_block(watch: Watch) -> Call:
    """`backend()` blocks with a call in them, for each backend by turns; every second one raises.

    Each torch.library.Library leaks about 50 bytes, even an empty one.
    """
    names = [name for name in backends("swiglu") if name != "triton"]
    turns = Turns(itertools.product(names, [False, True]))

    def call():
        name, raises = turns()
        x = leaf(4, 64)
        with contextlib.suppress(Interruption), fusedops.backend(name):
            y = fusedops.functional.swiglu(x, x)
            watch(x, y)
            y.sum().backward()
            if raises:
                interrupt()

    return call


LIVES = {
    "training a patched llama": training("llama"),
    "generate, dynamic cache": generate("llama", "dynamic"),
    "generate, static cache": generate("llama", "static"),
    "a llama, patched and dropped": life("llama"),
    "a forward that raises in patch": broken_forward,
    "patched()": patched_block,
    "backend()": backend_block,
}
LONG_LIVES = {
    **{f"training a patched {name}": training(name) for name in LAYER},
    "generate of T5": generate("t5", "dynamic"),
    "generate of GPT-2": generate("gpt2", "dynamic"),
    **{f"a {name}, patched and dropped": life(name) for name in LAYER},
    "patch that is refused": refused,
    "quantize": quantized,
    "verify": verified,
}
