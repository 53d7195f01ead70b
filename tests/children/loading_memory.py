"""Child script: measures the memory of loading a mixture-of-experts model as nf4.

Run by tests/patching/models/test_quantized_experts.py.

`python -m children.loading_memory FOLDER` in tests/ prints four numbers of bytes as JSON: by how
much anonymous memory grew at most while the model was loaded, the sizes of the loaded model and of
the checkpoint, and the float size of one layer's experts.
"""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fusedops.integrations.transformers import QuantizationConfig

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "num_experts": 32, "num_experts_per_tok": 2}
SIZES |= {"moe_intermediate_size": 512, "decoder_sparse_step": 1}
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32}


def saved(folder: Path, **sizes: int) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES | sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def loaded(folder: Path):
    quantized = QuantizationConfig("nf4", scale="absmax")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized)


def anonymous() -> int:
    """Bytes of resident memory that no file backs: not the mapped checkpoint's."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in x)
    return int(line.split()[1]) * 1024


def highest(run) -> tuple[int, object]:
    before, most, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            most.append(max(most.pop(), anonymous() - before))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = run()
    finally:
        over.set()
        thread.join()
    return most[0], result


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    loaded(saved(folder / "small", **SMALL))  # imports, and first calls
    saved(folder / "large")
    gc.collect()
    peak, model = highest(lambda: loaded(folder / "large"))
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    checkpoint = sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
    layer = 2 * 3 * SIZES["num_experts"] * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
    print(json.dumps([peak, size, checkpoint, layer]))
