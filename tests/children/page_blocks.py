"""Child script: runs a documentation page's Python code blocks in order, as a reader would.

`python -m children.page_blocks PAGE`. Blocks of guides use a model, its batches and an optimizer
that they do not make; `names` has these.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import fusedops

WORDS = 512


def blocks(page: Path) -> list[tuple[int, str]]:
    """The page's blocks marked as `python`, each with the line before its first."""
    text = page.read_text(encoding="utf-8")
    matches = re.finditer(r"^```python\n(.*?)^```$", text, re.S | re.M)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in matches]


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make_batch(batch: int, length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, WORDS, (batch, length))
        return {"input_ids": ids, "labels": ids}

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loader = [make_batch(2, 32) for _ in range(30)]

    def train() -> None:
        for batch in loader:
            step(batch)

    ids = loader[0]["input_ids"]
    namespace = {"fusedops": fusedops, "torch": torch, "transformers": transformers, "model": model}
    namespace |= {"optimizer": optimizer, "make_batch": make_batch, "step": step, "train": train}
    return namespace | {"loader": loader, "batch": loader[0], "inputs": {"input_ids": ids}}


def main(page: Path) -> None:
    """Runs the blocks of `page` in one namespace; errors name its line."""
    scope = {"__name__": "__main__"} | names()
    for line, block in blocks(page):
        exec(compile("\n" * line + block, str(page), "exec"), scope)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
