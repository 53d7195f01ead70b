"""Finds out why a training loop is slow and mends it: profile, try the advice, compare.

    python examples/profile_and_fix.py          # a BERT of 1.4M parameters; about a minute
    python examples/profile_and_fix.py --tiny   # half a minute

The loop has two faults: its dataset tokenizes a whole file to cut one piece out of it, and its
model runs eager. Expect the verdict "input", and advice on both. `measure` tries a change on the
live step and undoes it. The last table compares the loop before and after.
"""

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

import fusedops

TINY = "--tiny" in sys.argv
BATCH, LENGTH, WORDS = (4, 64, 512) if TINY else (16, 32, 4096)
HIDDEN, LAYERS = (64, 2) if TINY else (128, 4)
OPTIONS = {"steps": 5, "budget_s": 10} if TINY else {"steps": 15, "budget_s": 60}
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda f: -f.stat().st_size)
TEXTS = [file.read_text() for file in FILES[:64]]
WORD = re.compile(r"\w+|\S")


def tokenize(text):
    """A text's words and signs, as numbers; 0 is unknown."""
    return [vocabulary.get(word, 0) for word in WORD.findall(text)]


class Slow(Dataset):
    def __len__(self):
        return 10 * len(TEXTS)

    def __getitem__(self, i):
        piece, text = divmod(i, len(TEXTS))
        return torch.tensor(tokenize(TEXTS[text])[piece * LENGTH : (piece + 1) * LENGTH])


class Fast(Slow):
    def __init__(self):
        self.pieces = [Slow.__getitem__(self, i) for i in range(len(self))]

    def __getitem__(self, i):
        return self.pieces[i]


def step(tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def profile(dataset):
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return fusedops.profile(step, data=loader, model=model, optimizer=optimizer, **OPTIONS)


counted = Counter(word for text in TEXTS for word in WORD.findall(text))
vocabulary = {word: i for i, (word, _) in enumerate(counted.most_common(WORDS - 1), 1)}
sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": LAYERS}
config = BertConfig(vocab_size=WORDS, num_attention_heads=HIDDEN // 64, **sizes)
model = BertForMaskedLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

before = profile(Slow())
before.measure("patch")  # the advice's column "measured"
print(before)

fusedops.patch(model)
after = profile(Fast())
print(fusedops.compare(before, after))  # also of saved reports: before.save("before.json")
