"""fusedops.memory of transformers' model types that look for padding, with and without a pad id."""

import pytest
import transformers

import fusedops
from checks.families.planned import judge_memory
from checks.families.shrink import SHRINKINGS, tiny

# Callers of transformers' warn_if_padding_and_no_attention_mask, which reads ids; the others of
# them need images or sounds.
LOOK_FOR_PADDING = (
    *("big_bird", "canine", "convbert", "deberta", "deberta-v2", "dpr", "funnel", "gpt2"),
    *("layoutlm", "longformer", "luke", "markuplm", "megatron-bert", "mra", "nystromformer"),
    *("openai-gpt", "rembert", "roformer", "splinter", "squeezebert", "tapas", "visual_bert"),
    "yoso",
)
# Without a pad id these raise for real as well.
NEED_PADDING = "dpr", "longformer", "luke", "markuplm"
# And types whose tensors start on the CPU, read activations, or lack a kernel on meta.
MEASURED = "causal/diffllama", "causal/xlnet", "masked/deberta-v2", "masked/roformer"
MEASURED += "causal/openai-gpt", "masked/convbert", "audio/wav2vec2-bert"


def planned(kind, pad, **options):
    config = tiny(transformers.CONFIG_MAPPING[kind], SHRINKINGS[0])
    config.pad_token_id = pad
    return fusedops.memory(config, batch=2, length=16, **options)


@pytest.mark.parametrize("kind", LOOK_FOR_PADDING)
def test_a_type_that_looks_for_padding(kind):
    """A pad id changes nothing: the planned rows have no padding."""
    plan = planned(kind, 0)
    assert plan.gradients and plan.activations and planned(kind, 0, mode="forward").peak
    if kind in NEED_PADDING:
        with pytest.raises(RuntimeError, match=r"^memory: .* which raised .*Error: .* \(at m.*py:"):
            planned(kind, None)
    else:
        assert planned(kind, None).peak == pytest.approx(plan.peak, rel=1e-3)


@pytest.mark.parametrize("name", MEASURED)
def test_a_plan_is_what_a_step_takes(name):
    """Categories to the byte, what is saved within 10 %, and so the peak of each plan."""
    row = judge_memory(*name.split("/"))
    assert row["verdict"] == "right", row["why"]
    whys = [why for why in row["plans"].values() if "the model itself raises" not in why]
    assert whys and all(abs(float(why.strip("peak %"))) < 10 for why in whys)
