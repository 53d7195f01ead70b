"""Child script: measures the memory of a small model's steps and prints it as JSON.

    python measured_memory.py llama '[{"checkpoint": true}, {"patched": true}]'

Each also holds "sum": the peak of the profiler's own counter, and what was allocated before.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import transformers

import fusedops
from fusedops.measuring.memory import measure_memory

sys.path.insert(0, str(Path(__file__).parents[1]))
from profiling.cases import OPTIMIZERS, model_of, tokens, training_step

os.environ["KINETO_LOG_LEVEL"] = "99"


def main(name, variants):
    transformers.logging.set_verbosity_error()
    print(json.dumps([measured(name, **variant) for variant in json.loads(variants)]))


def measured(name, mode="train", dtype="float32", attention="sdpa", **options):
    torch.manual_seed(0)
    model = model_of(name, getattr(torch, dtype), mode == "train", attention)
    if options.get("quantize"):
        fusedops.quantize(model, options["quantize"])
    if options.get("lora_rank"):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=options["lora_rank"], target_modules="all-linear")
        model = get_peft_model(model, config)
    if options.get("checkpoint"):
        model.gradient_checkpointing_enable()
    if options.get("patched"):
        fusedops.patch(model)
    kinds = OPTIMIZERS | {"adamw8bit": fusedops.optim.AdamW8bit}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kinds[options.get("optimizer", "adamw")](trained)
    step = STEPS[mode](model, optimizer)
    step()  # makes the optimizer's state
    use = measure_memory(step, model=model, optimizer=optimizer)
    return use.to_dict() | {"sum": held(model, optimizer) + counted(step)}


def train(model, optimizer):
    return training_step(model, optimizer, tokens(), tokens())


def forward(model, _):
    ids = tokens()

    def step():
        with torch.no_grad():
            model(input_ids=ids, **({"decoder_input_ids": ids} if is_pair(model) else {}))

    return step


def generate(model, _):
    """Reads all but the last token, and one more, as fusedops.memory plans it."""
    ids = tokens()
    name = "decoder_input_ids" if is_pair(model) else "input_ids"

    def step():
        more = {} if is_pair(model) else {"logits_to_keep": 1}
        with torch.no_grad():
            if is_pair(model):
                more["encoder_outputs"] = model.get_encoder()(input_ids=ids)
            out = model(**{name: ids[:, :-1]}, use_cache=True, **more)
            cache = out.past_key_values
            del out
            model(**{name: ids[:, -1:]}, use_cache=True, past_key_values=cache, **more)

    return step


STEPS = {"train": train, "forward": forward, "generate": generate}


def is_pair(model):
    return model.config.is_encoder_decoder


def held(model, optimizer):
    """Bytes of parameters, buffers and state."""
    states = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def counted(step):
    """How far the profiler's counter of allocated bytes rises in a step."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    first = changes[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    return max(event["args"]["Total Allocated"] for event in changes) - before


if __name__ == "__main__":
    main(*sys.argv[1:])
