"""The demo's small Llama, its text, and the training setups (contenders) that it compares."""

import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from fusedops import toolchain
from fusedops.optim import AdamW8bit

EAGER, TORCH_FUSED, COMPILED, FUSED = CONTENDERS = (
    "eager",
    "eager, fused AdamW",  # torch.optim.AdamW(fused=True)
    "torch.compile",  # with the same optimizer
    "fused",
)


@dataclass(frozen=True)
class Settings:
    """The demo's model and training settings; by default the model has 10.8M parameters."""

    steps: int = 60
    batch: int = 4
    length: int = 128  # tokens per sequence
    hidden: int = 384
    layers: int = 6
    lr: float = 4e-4
    seed: int = 0
    dtype: str = "bfloat16"  # float32 where torch has no kernel for bfloat16 products

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length


QUICK = Settings(steps=8, batch=2, length=32, hidden=64, layers=2)


def corpus() -> Tensor:
    """The standard library's source, one token per byte: int64 [bytes]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def batches(settings: Settings) -> Iterator[Tensor]:
    """int64 [batch, length] pieces of the corpus, the same for the same seed."""
    text, random = corpus(), torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - settings.length, (settings.batch, 1), generator=random)
        yield text[starts + torch.arange(settings.length)]


def build_model(settings: Settings) -> torch.nn.Module:
    """A LlamaForCausalLM with weights drawn from the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 64,
        max_position_embeddings=settings.length,
        use_cache=False,
    )
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config).to(getattr(torch, settings.dtype)).train()


def fast_dtype() -> str:
    """The dtype to train in: without AVX-512, torch's bfloat16 products take 20 times as long."""
    return "bfloat16" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "float32"


def why_not(contender: str) -> str | None:
    """Why a contender cannot run here; None if it can."""
    if contender == COMPILED and shutil.which(toolchain.compiler()[0]) is None:
        return "no C++ compiler"
    return None


class Trainer:
    """One contender: its model, its optimizer, and each step's loss and seconds."""

    def __init__(self, contender: str, settings: Settings) -> None:
        self.model = build_model(settings)
        self.report = _patch(self.model) if contender == FUSED else None
        if contender == COMPILED:
            self.model.compile(dynamic=False)
        self.optimizer = _optimizer(contender, self.model, settings.lr)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def compile(self, tokens: Tensor) -> float:
        """Compiles forward and backward, without a step. Returns the seconds."""
        start = perf_counter()
        self._backward(tokens)
        self.optimizer.zero_grad()
        return perf_counter() - start

    def step(self, tokens: Tensor) -> None:
        start = perf_counter()
        loss = self._backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(perf_counter() - start)
        self.losses.append(loss.item())

    def _backward(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss


def _optimizer(contender: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    if contender == FUSED:
        return AdamW8bit(model.parameters(), lr=lr)
    fused = None if contender == EAGER else True
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)


def _patch(model: torch.nn.Module) -> object:
    from fusedops.patching import patch

    return patch(model)
