"""Import and patch change only the global state that the guide to patch lists."""

import json
from pathlib import Path

import pytest
from children import forked

pytest.importorskip("transformers")
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "patch.md").read_text(encoding="utf-8")

# In a process of its own: all that modules of torch and transformers hold, by name, classes'
# attributes and the contents of tables included. Values are kept, so that no id is used again.
SNAPSHOT = """
import json, sys, types
import torch, torch.utils.flop_counter, transformers, transformers.quantizers.auto
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import AttentionInterface, AttentionMaskInterface  # a lazy module notes them

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
kept = []

def llama():
    heads = {"num_attention_heads": 4, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**SIZES | heads))

def step(model):
    ids = torch.ones(1, 8, dtype=torch.long)
    model(ids, labels=ids).loss.backward()

def held(value):
    kept.append(value)
    if issubclass(type(value), dict):
        return id(value), [(id(k), id(v)) for k, v in dict.items(value)]
    if type(value) in (list, tuple, set, frozenset):
        return id(value), sorted(map(id, value)) if type(value) is set else list(map(id, value))
    return id(value)

def inside(value):
    if issubclass(type(value), type):
        return type.__dict__["__dict__"].__get__(value)
    if issubclass(type(value), (types.ModuleType, types.FunctionType)):
        return {}
    try:
        return object.__getattribute__(value, "__dict__")
    except Exception:
        return {}

def snapshot():
    found = {"sys.meta_path": held(sys.meta_path), "sys.path_hooks": held(sys.path_hooks)}
    found |= {f"sys.{name}": held(getattr(sys, name)) for name in ("excepthook", "displayhook")}
    found["DTensor._custom_op_handlers"] = held(DTensor._op_dispatcher._custom_op_handlers)
    found["torch's random state"] = torch.get_rng_state().tolist()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "transformers", "warnings", "logging", "numpy"):
            continue
        for key, value in list(inside_of_module(module).items()):
            found[f"{name}.{key}"] = held(value)
            for attribute, part in list(inside(value).items()):
                found[f"{name}.{key}.{attribute}"] = held(part)
    return found

def inside_of_module(module):
    return object.__getattribute__(module, "__dict__") if hasattr(type(module), "__dict__") else {}

def changes(before):
    now = snapshot()
    return sorted(k for k in {*before, *now} if before.get(k) != now.get(k))

torch.ops.aten, llama()
step(llama())
report, model = {}, llama()
"""
RUN = """
before = snapshot()
import fusedops
report["import"] = changes(before)
torch.ops.fusedops.linear_forward, torch.ops.fusedops.attention  # torch.ops notes what is read
from torch._subclasses import schema_check_mode

before = snapshot()
fusedops.patch(model)
report["patch"] = changes(before)
before = snapshot()
step(model)
report["step"] = changes(before)
before = snapshot()
fusedops.unpatch(model)
report["unpatch"] = changes(before)
print(json.dumps(report))
"""
# Python's and torch's own notes: how instances of a class are copied, what was looked up by name.
CACHES = ".__slotnames__", "torch.jit._builtins._builtin_table", "torch.ops._dir"


@pytest.fixture(scope="module")
def changed():
    snapshots = json.loads(forked("-c", SNAPSHOT + RUN, large=True).printed().splitlines()[-1])
    return {when: [n for n in names if not n.endswith(CACHES)] for when, names in snapshots.items()}


def tables(names):
    """Returns the global tables by module and attribute; several names share each."""
    return {name.replace("._global_mapping", "").rpartition(".")[2] for name in names}


def test_the_import_changes_what_the_guide_says(changed):
    tables_of_quantizers = {"AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"}
    tables_named = {"meta_path", "fusedops", "_impls", "flop_registry", *tables_of_quantizers}
    tables_named |= {"_custom_op_handlers", "log_state_dict_report"}
    names = {"existing_custom_ops": "_custom_op_handlers"}  # torch's second name for that table
    assert {names.get(name, name) for name in tables(changed["import"])} == tables_named
    assert {"sys.meta_path", "torch.ops.fusedops"} <= {*changed["import"]}
    assert all(name in GUIDE for name in (*tables_named, "sys.meta_path", "torch.ops.fusedops"))


def test_patch_changes_what_the_guide_says(changed):
    interfaces = {"AttentionInterface", "AttentionMaskInterface"}
    assert tables(changed["patch"]) == interfaces
    assert all(name.endswith("._global_mapping") for name in changed["patch"])
    assert all(f"`{name}`" in GUIDE for name in interfaces)


def test_a_step_of_a_patched_model_and_unpatch_change_nothing(changed):
    assert changed["step"] == changed["unpatch"] == []


@pytest.mark.parametrize("attention", [True, False])
def test_the_entries_are_one_name(attention):
    lines = f"""
before = [[*table._global_mapping] for table in (AttentionInterface, AttentionMaskInterface)]
finders = sys.meta_path[:]
import fusedops
assert [type(f).__name__ for f in sys.meta_path if f not in finders] == ["ImportFinder"]
fusedops.patch(model, attention={attention})
after = [[*table._global_mapping] for table in (AttentionInterface, AttentionMaskInterface)]
assert after == [names + ["fusedops"] * {attention} for names in before], after
"""
    forked("-c", SNAPSHOT + lines, large=True).printed()


def test_the_finder_imports_none_of_what_it_waits_for():
    lines = """
import sys, fusedops
from fusedops import integrations
assert not {*integrations.AFTER_IMPORT} & {*sys.modules} and "transformers" not in sys.modules
import torch.utils.flop_counter
assert "fusedops.integrations.flops" in sys.modules and "transformers" not in sys.modules
"""
    forked("-c", lines, bare=True).printed()


def test_a_second_import_has_one_finder():
    """Two finders that search through each other would recurse forever."""
    lines = """
import importlib, sys, fusedops
importlib.reload(fusedops)
for name in [name for name in sys.modules if name.startswith("fusedops.integrations")]:
    del sys.modules[name]
import fusedops.integrations
fusedops.integrations.install()
assert [type(f).__name__ for f in sys.meta_path].count("ImportFinder") == 1
import torch.utils.flop_counter, inspect
assert torch.ops.fusedops.linear_forward in torch.utils.flop_counter.flop_registry
assert "FlopCounterMode" in inspect.getsource(torch.utils.flop_counter)
"""
    forked("-c", lines, bare=True).printed()


def test_inspecting_and_copying_a_spec_imports_nothing():
    lines = """
import copy, importlib.util, pickle, sys, fusedops
spec = importlib.util.find_spec("torch.utils.flop_counter")
copies = copy.copy(spec.loader), copy.deepcopy(spec.loader), pickle.loads(pickle.dumps(spec.loader))
for loader in (spec.loader, *copies):
    assert type(loader) is type(spec.loader) and loader.path == spec.origin
    assert "class FlopCounterMode" in loader.get_source(spec.name)
assert "torch.utils.flop_counter" not in sys.modules
"""
    forked("-c", lines, bare=True).printed()
