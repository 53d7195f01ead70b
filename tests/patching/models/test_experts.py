"""patch fuses transformers' mixture-of-experts layers with `experts`; unpatch restores them."""

import copy
import pickle

import pytest
import torch
from axes import grid

from fusedops.patching import patch, unpatch
from fusedops.patching.core.config import gate_of
from fusedops.patching.core.source import innermost
from fusedops.patching.core.swap import original_class
from fusedops.patching.patch import look_again
from fusedops.patching.yardstick import Yardstick, run
from fusedops.testing import yardstick

transformers = pytest.importorskip("transformers")
from checks.families.judge import first_that_runs  # noqa: E402
from patching.models.experts_cases import ALONE, MODELS, build, ids, results  # noqa: E402

GATES = {"gpt_oss": "experts(silu, interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0)"}


def exactly(model):
    """A copy in float64, which torch's grouped_mm does not take."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")
    return wide


@grid(name=MODELS, implementation=["eager", "grouped_mm"])
def test_outputs_and_gradients(name, implementation):
    model, batch = build(name), {"input_ids": ids(), "labels": ids()}
    model.set_experts_implementation("eager")  # torch's grouped_mm does not take float64
    allowed = Yardstick(model, batch)
    model.set_experts_implementation(implementation)
    report = patch(model, **ALONE)
    assert report.coverage == {"experts": (2, 2)} and not report.skipped
    assert {site.now for site in report.fused} == {GATES.get(name, "experts(silu)")}
    after = run(model, batch)
    assert not allowed.off(after, model)
    assert any(not torch.equal(after[key], allowed.eager[key]) for key in after)  # another code ran


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_unpatch_gives_back_the_bits(name):
    model = build(name)
    config, before = model.config, results(model)
    held = [m.config for m in model.modules() if hasattr(m, "num_experts") and hasattr(m, "config")]
    assert held and all(module_config is config for module_config in held)
    patch(model, **ALONE)
    assert model.config is config and config._experts_implementation == "grouped_mm"
    unpatch(model)
    assert all(m.config is config for m in model.modules() if hasattr(m, "config"))
    after = results(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@grid(name=["qwen3_moe", "gpt_oss", "mixtral"], everything=[False, True])
def test_generate(name, everything):
    model = build(name)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids(5), **greedy)
    report = patch(model, **{} if everything else ALONE)
    assert report.coverage["experts"] == (2, 2)
    assert torch.equal(model.generate(ids(5), **greedy), expected)


@grid(name=["qwen3_moe", "gpt_oss"], dtype=[torch.float32, torch.bfloat16])
def test_bfloat16_and_autocast(name, dtype):
    """Float32 weights are cast by autocast."""
    model = build(name, dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        before = model(input_ids=ids()).logits
        patch(model, **ALONE)
        after = model(input_ids=ids()).logits
    with torch.no_grad():
        unpatch(model)
        exact = exactly(model)(input_ids=ids()).logits
    assert after.dtype == before.dtype and not torch.equal(after, before)
    assert yardstick(after, before, exact) is None


def test_checkpointing_gives_the_same_gradients():
    model = build("qwen3_moe").train()
    patch(model, **ALONE)
    expected = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    actual = results(model)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_compiles_without_a_graph_break():
    model = build("qwen3_moe")
    patch(model, **ALONE)
    expected = model(input_ids=ids()).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids()).logits, expected)


def test_another_implementation_set_later_runs():
    model = build("qwen3_moe")
    before = results(model)
    report = patch(model, **ALONE)
    model.set_experts_implementation("eager")
    unfused = build("qwen3_moe")
    unfused.set_experts_implementation("eager")
    actual, expected = results(model), results(unfused)
    assert all(torch.equal(actual[key], expected[key]) for key in before)
    assert look_again(model, report)
    assert {site.reason for site in report.skipped} == {
        "the implementation was set to eager after patch"
    }


def test_a_copy_stays_fused_and_a_pickle_does_not():
    model = build("qwen3_moe")
    patch(model, **ALONE)
    expected = results(model)
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, results(twin).values(), expected.values()))
    assert sum(gate_of(m) is not None for m in twin.modules()) == 2
    loaded = pickle.loads(pickle.dumps(model))
    assert not any(gate_of(m) for m in loaded.modules())


# A gate, layout or routing that MODELS lack.
FAMILIES = {
    ("causal", "aria_text"): "experts(silu)",
    ("causal", "deepseek_v3"): "experts(silu)",
    ("causal", "deepseek_v4"): "experts(silu, limit=10.0)",
    ("causal", "jamba"): "experts(silu)",
    ("causal", "nemotron_h"): "experts(relu2, gated=False)",
    ("causal", "minimax_m3_vl_text"): "experts(silu, limit=7.0, alpha=1.702, up_offset=1.0)",
    ("base", "muse_spark_text"): "experts(silu)",
    ("base", "openai_privacy_filter"): "experts(silu, limit=7.0, alpha=1.702, up_offset=1.0)",
}


def shrunk(kind, family):
    model, batch, _ = first_that_runs(kind, family)
    return model, batch


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[1])
def test_a_family_is_fused_and_right(family):
    model, batch = shrunk(*family)
    allowed = Yardstick(model, batch)
    report = patch(model, **ALONE)
    assert {site.now for site in report.fused} == {FAMILIES[family]} and not report.skipped
    assert not allowed.off(run(model, batch), model)


def test_a_choice_of_no_expert_adds_nothing_to_normalised_results():
    """Nor does the norm's bias."""
    model, _ = shrunk("base", "muse_spark_text")
    patch(model, **ALONE)
    module = experts_of(model)[0]
    count, hidden = module.down_proj.shape[:2]
    module.post_expert_norm = torch.nn.LayerNorm(hidden)
    torch.nn.init.normal_(module.post_expert_norm.bias)
    index = torch.tensor([[0, count], [count, 1], [count, count], [1, 0]])
    x, weights = torch.randn(4, hidden), torch.rand(4, 2)
    out = module(x, index, weights)
    torch.testing.assert_close(out, innermost(original_class(module))(module, x, index, weights))
    assert (out[2] == 0).all() and out[0].any()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_model_on_meta_is_patched_before_its_weights_come(name):
    model, later = build(name), build(name).to("meta")
    report = patch(later, **ALONE)
    assert report.coverage == {"experts": (2, 2)}
    assert later(input_ids=ids().to("meta")).logits.is_meta
    later.load_state_dict(model.state_dict(), assign=True)
    for module, other in zip(later.modules(), model.modules(), strict=True):
        module._buffers = other._buffers  # of rotary embeddings, which are not saved
    patch(model, **ALONE)
    expected, actual = results(model), results(later)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "_apply_gate")]


class Halved:
    """A gate that no option has."""

    def __call__(self, x):
        return x * torch.sigmoid(x) * 0.5


LEFT = {
    "its gate is not one that `experts` has": lambda m: setattr(m, "act_fn", Halved()),
    "its forward is replaced on the instance": lambda m: setattr(m, "forward", lambda *a: a[0]),
    "its implementation is set to sonicmoe": lambda m: setattr(
        m.config, "_experts_implementation_internal", "sonicmoe"
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_says_why(reason):
    model = build("qwen3_moe", num_hidden_layers=1)
    for module in experts_of(model):
        del module._modules["act_fn"]
        module.act_fn = torch.nn.functional.silu
        LEFT[reason](module)
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model, **ALONE)
    assert [site.reason for site in report.skipped] == [reason]


def test_a_forward_that_computes_something_else_is_left():
    model = build("qwen3_moe", num_hidden_layers=1)
    (module,) = experts_of(model)

    class Doubled(type(module)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    module.__class__ = Doubled
    with pytest.warns(UserWarning, match="nothing was fused"):
        report = patch(model, **ALONE)
    assert [s.reason for s in report.skipped] == ["its forward gives different results"]


def test_counts_see_the_kernel():
    model = build("qwen3_moe")
    report = patch(model, **ALONE)
    counted = report.counts({"input_ids": ids(), "labels": ids()})
    assert [(s.kind, s.kernel, s.fallback, s.backward_kernel) for s in counted.sites] == [
        ("experts", 1, 0, 1)
    ] * 2


def test_an_api_that_is_gone_is_the_reason(monkeypatch):
    model, name = build("qwen3_moe", num_hidden_layers=1), "grouped_mm_experts_forward"
    monkeypatch.delattr(f"transformers.integrations.moe.{name}")
    with pytest.warns(UserWarning, match="nothing was fused"):
        (site,) = patch(model, **ALONE).skipped
    assert f"has no integrations.moe.{name}, which patch relies on" in site.reason
