"""FusedOpsCallback works in TRL's trainers: correct reports, equal losses."""

import inspect
import logging
import textwrap

import pytest
import torch

pytest.importorskip("trl")
import datasets
import peft
import transformers
import trl
from patching.architectures import GROUPED
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile

import fusedops
from fusedops.integrations.transformers import FusedOpsCallback

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("any_size"),
]
LINES = [line.strip() for line in inspect.getsource(textwrap).splitlines() if len(line) > 30][:16]
PAIRS = [
    {"prompt": a[:12], "chosen": a[12:24], "rejected": b[12:20]}
    for a, b in zip(LINES[:8], LINES[8:], strict=True)
]
SIZES = GROUPED | {"vocab_size": 128}


def llama(kind="ForCausalLM", **more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | more)
    return getattr(transformers, f"Llama{kind}")(config)


def tokenizer():
    """Returns a tokenizer with one token per character."""
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(32, 127))])}
    words_model = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    words_model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_model, **tokens)


def sft(**more):
    rows = datasets.Dataset.from_list([{"text": line} for line in LINES[:8]])
    return trl.SFTTrainer, trl.SFTConfig, llama(), {"train_dataset": rows}, more


def dpo(**more):
    rows = datasets.Dataset.from_list(PAIRS)
    given = {"train_dataset": rows, "ref_model": llama()}
    return trl.DPOTrainer, trl.DPOConfig, llama(), given, more


def reward(**more):
    rows = datasets.Dataset.from_list(PAIRS)
    model = llama("ForSequenceClassification", num_labels=1)
    return trl.RewardTrainer, trl.RewardConfig, model, {"train_dataset": rows}, more


def grpo(**more):
    prompts = datasets.Dataset.from_list([{"prompt": line[:8]} for line in LINES[:8]])
    rewards = {"reward_funcs": lambda completions, **_: [float(len(set(c))) for c in completions]}
    sizes = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
    return (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        llama(),
        {"train_dataset": prompts, **rewards},
        sizes | more,
    )


def kto(**more):
    """Returns KTO's trainer and arguments. A batch needs desirable and undesirable completions."""
    keys = "chosen", "rejected"
    rows = [
        {"prompt": pair["prompt"], "completion": pair[keys[i % 2]], "label": i % 2 == 0}
        for i, pair in enumerate(PAIRS)
    ]
    given = {"train_dataset": datasets.Dataset.from_list(rows), "ref_model": llama()}
    return trl.KTOTrainer, trl.KTOConfig, llama(), given, more


def rloo(**more):
    """Without a reference model, which it would load by the model's name."""
    _, _, *case, options = grpo()
    return trl.RLOOTrainer, trl.RLOOConfig, *case, options | {"beta": 0.0} | more


def trainer(case, path, callbacks=()):
    kind, config, model, kwargs, arguments = case
    arguments = {
        **{"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "seed": 0},
        **{"logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"},
        **{"disable_tqdm": True, "bf16": False, **arguments},
    }
    args = config(output_dir=str(path), **arguments)
    return kind(
        model=model, args=args, processing_class=tokenizer(), callbacks=list(callbacks), **kwargs
    )


def losses(run):
    """Returns the steps' losses, and the names of the fused operators that ran."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run.train()
    ran = {
        event.key.removeprefix("fusedops::")
        for event in seen.key_averages()
        if "fusedops::" in event.key
    }
    return torch.tensor([row["loss"] for row in run.state.log_history if "loss" in row]), ran


OPERATORS = {
    "norm": "norm_forward",
    "residual": "norm_forward",
    "rotary": "rotary_forward",
    "mlp": "gated_activation_forward",
    "attention": "attention_forward",
    "loss": "linear_cross_entropy_forward",
}


@pytest.mark.parametrize(
    "case,bf16",
    [*((case, False) for case in (sft, dpo, kto, grpo, rloo, reward)), (sft, True), (grpo, True)],
)
def test_the_report_says_what_ran(case, bf16, tmp_path, caplog):
    """TRL computes losses itself, with its own head except for rewards."""
    callback = FusedOpsCallback()
    with caplog.at_level(logging.INFO, "fusedops"):
        ours = trainer(case(bf16=bf16), tmp_path, [callback])
        logged, ran = losses(ours)
    theirs, plain = losses(trainer(case(bf16=bf16), tmp_path))
    assert not plain and len(logged) == 2
    near = 2e-2 if bf16 else 2e-4
    torch.testing.assert_close(logged, theirs, rtol=near, atol=near)
    coverage = callback.report.coverage
    for kind, operator in OPERATORS.items():
        assert (operator in ran) == (coverage.get(kind, (0, 0))[0] > 0), kind
    assert not {"linear_cross_entropy_forward", "cross_entropy_forward"} & ran
    assert [coverage[kind] for kind in ("norm", "attention")] == [(5, 5), (2, 2)]
    if case is not reward:
        (left,) = (site for site in callback.report.skipped if site.kind == "loss")
        whose = "_fused_forward of trl.trainer.utils replaces its forward"
        assert left.reason == f"{whose} and uses its own head"
        first, then = caplog.messages
        assert "loss: 1 of 1 fused" in first and "loss: 0 of 1 fused" in then
        assert "keep_logits" in first and "keep_logits" not in then
        assert then == f"as training begins: {callback.report}"


def test_a_model_that_is_patched_in_a_trainer_says_so_at_once(tmp_path):
    run = trainer(sft(), tmp_path)
    report = fusedops.patch(run.model)
    assert report.coverage["loss"] == (0, 1) and "trl.trainer.utils" in str(report)


def test_adapters(tmp_path):
    """TRL wraps the model, and gives the base model its head."""
    kind, config, model, given, more = sft()
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    callback = FusedOpsCallback()
    _, ran = losses(
        trainer((kind, config, model, given | {"peft_config": lora}, more), tmp_path, [callback])
    )
    (left,) = (site for site in callback.report.skipped if site.kind == "loss")
    assert left.path == "base_model.model.lm_head" and "trl.trainer.utils" in left.reason
    assert "norm_forward" in ran and not any("cross_entropy" in name for name in ran)
