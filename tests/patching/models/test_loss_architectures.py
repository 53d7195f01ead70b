"""patch's fused loss with the heads of several architectures, with LoRA too."""

import pytest
import torch
from axes import grid

from fusedops.patching import unpatch
from patching.architectures import BART, GPT, GROUPED, PLAIN, WIDE
from patching.models.loss_cases import IDS, in_float64, judge, loss_site, made, results, several

pytestmark = pytest.mark.usefixtures("any_size")

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

CAPPED = {**WIDE, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}

# Plain, tied, biased, scaled and softcapped heads, and models whose loss has a term of its own.
MODELS = {
    "llama": GROUPED,
    "gpt2": GPT,
    "phi": PLAIN,
    "cohere2": {**GROUPED, "sliding_window": 4},
    "gemma2": CAPPED,
    "granitemoe": {**GROUPED, "logits_scaling": 4.0, "num_local_experts": 4},
    "gpt_bigcode": GPT,
    "falcon_h1": {
        **{**WIDE, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
        **{"mamba_n_groups": 1, "lm_head_multiplier": 0.5},
    },
    "mixtral": {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
    "persimmon": PLAIN,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64},
    "codegen": {**GPT, "rotary_dim": 4},
    "bert": {**PLAIN, "is_decoder": True},
}
OWN_CODE = {
    "bart": BART,
    "marian": {**BART, "decoder_start_token_id": 1},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 64},
}


def build(name, sizes):
    """Builds a model with random weights, large enough for a softcap to matter."""
    config = transformers.AutoConfig.for_model(name, **sizes)
    torch.manual_seed(0)
    kwargs = {"dtype": torch.float32, "experts_implementation": "eager"}  # grouped has no float64
    model = transformers.AutoModelForCausalLM.from_config(config, **kwargs).eval()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[name])
    model = peft.get_peft_model(model, config).eval()
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.normal_()
    return model


def compare(model):
    eager = several(model)
    with in_float64(model) as copy:
        exact = several(copy)
    site = loss_site(model)
    judge(several(model), eager, exact)
    return site


@grid(
    dtype=[torch.float32, torch.bfloat16],
    name=MODELS,
)
def test_loss_and_gradients(name, dtype):
    model = build(name, MODELS[name]).to(dtype)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    site = compare(model)
    assert (site.now, site.reason) == ("linear_cross_entropy", "")
    outputs = model(input_ids=IDS, labels=IDS)
    assert not made(outputs)
    assert torch.equal(outputs.logits.detach(), logits)
    unpatch(model)
    assert type(model(input_ids=IDS, labels=IDS).logits) is torch.Tensor


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma2", "granitemoe"])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_with_lora_on_the_head(name):
    model = with_lora(build(name, MODELS[name]))
    site = compare(model)
    assert site.now == "cross_entropy" and "of peft, is not a plain linear" in site.reason
    trained = {name.split(".")[-3] for name in results(model)[1] if name != "loss"}
    assert trained == {"lora_A", "lora_B"}


@grid(
    dtype=[torch.float32, torch.bfloat16],
    name=OWN_CODE,
)
def test_a_loss_that_the_forward_computes(name, dtype):
    model = build(name, OWN_CODE[name]).to(dtype)
    site = compare(model)
    assert (site.now, site.reason) == ("linear_cross_entropy", "")
    assert not made(model(input_ids=IDS, labels=IDS))
