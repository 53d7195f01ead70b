"""Shrinks any transformers config to a tiny one, by its attributes' names.

All parts share one width, so that their interfaces fit. No family has special code.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["SHRINKINGS", "VOCABULARY", "tiny"]

WIDTH, HEADS, GROUPS, HEAD = 64, 4, 2, 16
LAYERS, MOST_LAYERS, VOCABULARY, POSITIONS = 2, 8, 128, 64
FIRST_ID = 3  # 0, 1 and 2 are padding, start and end

# (pattern of names, largest value); the first match counts
KEY_HEADS = r".*(key_value_heads|kv_heads|num_groups_kv)|num_kv_groups"
HEAD_COUNTS = r".*(heads|n_head|num_head)(_per_stage)?"
LAYER_COUNTS = r".*(layers|n_layer|depth|num_blocks)"
TINY: tuple[tuple[str, int], ...] = (
    (r".*vocab.*|n_words|num_embeddings|codebook_size", VOCABULARY),
    (r"first_k_dense.*|num_dense_layers|.*layer_start_index|attention_types", 1),
    (LAYER_COUNTS, LAYERS),
    (r"mm_tokens_per_image|image_embedding_size", 4),
    (r"num_pos_feats", WIDTH // 2),
    (KEY_HEADS, GROUPS),
    (r".*lora_rank|.*_rank|adapter_rank|q_rank|kv_rank", 16),
    (r"rotary_dim", 8),
    (r".*(head_dim|d_kv|d_head|dim_head|kv_channels|head_size|key_dim|value_dim)", HEAD),
    (HEAD_COUNTS, HEADS),
    (r".*(experts_per_tok|experts_per_token|top_?k|moe_k)", 2),
    (r".*(num_experts|routed_experts|local_experts|n_experts|experts)", 4),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*(mamba_expand|expand)", 1),
    (r".*(ngroups|n_groups|num_groups)", 1),
    (r".*(state_size|d_state|ssm_state_size)", 16),
    (r".*moe.*(intermediate_size|ffn.*)|.*expert.*(size|dim)", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|mlp_dim|ffn_size|dim_ff|ffn)", 96),
    (r".*(sliding_window|window_size|attention_window|local_attention|chunk_size|block_size)", 8),
    (r".*(image_size|crop_size|img_size)", 32),
    (r".*patch_size", 8),
    (r".*(num_mel_bins|feature_size|num_mels|mel_bins|n_mels)", 16),
    (r".*(position.*|n_positions|max_seq_len|max_length|n_ctx|context_length|max_len)", POSITIONS),
    (r".*(groups)", 2),
    (
        r".*(size|dim|d_model|n_embd|channels?|filters|width|dims?|hidden|sizes|d_inner|mamba_d_ssm"
        r"|dimension|embed|units|d_rel)(_per_stage)?",
        WIDTH,
    ),
    (r".*(num_queries|num_latents|num_query_tokens|num_labels|num_codebooks)", 8),
)
KEPT = re.compile(
    r".*(theta|eps|std|factor|scale|rate|dropout|prob|init|kernel.*|stride.*|conv_kernel.*"
    r"|(_id|_ids|index)|num_channels|num_buckets|max_distance|dilation|padding|temporal_patch_size"
    r"|spatial_merge_size|quant.*|pixel.*|pad_size)"
)
IDS = re.compile(
    r".*(token_id|token_index|start_token|end_token)s?|(bos|eos|pad|sep|cls|mask)_index"
)
OPEN = {"head_dim": HEAD, "num_key_value_heads": GROUPS, "num_experts_per_tok": 2}
OPEN |= {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts": 4,
    "vocab_size": VOCABULARY,
}
LEFT: Any = object()
USUAL_IDS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}


@dataclasses.dataclass(frozen=True)
class Shrinking:
    """One way to shrink a config.

    table: use the sizes by name; otherwise only layers and vocabulary shrink, for models whose
    sizes depend on each other in special ways. fills: set numbers that the defaults leave unset.
    types: pass the layers' types instead of letting the config derive them. deep: keep all layers,
    if other attributes refer to some of them.
    """

    name: str
    table: bool = True
    deep: bool = False
    fills: bool = False
    types: bool = False

    def size(self, name: str, value: int, layers: int) -> int:
        small = next((n for names, n in TINY if re.fullmatch(names, name)), value)
        if small == LAYERS and re.fullmatch(LAYER_COUNTS, name):
            return value if self.deep else min(value, layers)
        if re.fullmatch(HEAD_COUNTS, name):
            return min(value, small) & -2 or 1  # so that 3, 6, 12 and 24 heads divide the width too
        return min(value, small) if self.table or small == VOCABULARY else value


SHRINKINGS = (
    Shrinking("tiny"),
    Shrinking("tiny, with layer types", types=True),
    Shrinking("tiny, filled", fills=True),
    Shrinking("tiny, filled, with layer types", fills=True, types=True),
    Shrinking("tiny, all layers", deep=True),
    Shrinking("tiny, filled, all layers", deep=True, fills=True),
    Shrinking("few layers", table=False),
    Shrinking("few layers, with layer types", table=False, types=True),
)


def tiny(cls: type[Any], shrinking: Shrinking, **more: Any) -> Any:
    """Returns the class's default config with smaller sizes.

    more: attributes to set, if the class has them.
    """
    default = cls()
    ids = {name: at for at, name in enumerate(sorted(_ids(default)), FIRST_ID)}
    return _small(default, shrinking, ids, more)


def _small(config: Any, shrinking: Shrinking, ids: dict[str, int], more: dict[str, Any]) -> Any:
    layers = _layers(config, shrinking)
    sizes: dict[str, Any] = {}
    for name, default in _fields(config):
        value = vars(config).get(name)
        if name in more:
            sizes[name] = more[name]
        elif _is_config(value):
            sizes[name] = _small(value, shrinking, ids, {})
        elif isinstance(value, list | tuple) and value and all(map(_is_config, value)):
            sizes[name] = [_small(part, shrinking, ids, {}) for part in value]
        elif IDS.fullmatch(name):
            sizes[name] = default if value is None else _id(name, value, ids)
        else:
            sizes[name] = _size(config, name, value, default, shrinking, layers)
    if shrinking.deep and getattr(config, "out_indices", None):  # a backbone's, no field
        sizes["out_indices"] = list(config.out_indices)
    return type(config)(**{name: size for name, size in sizes.items() if size is not LEFT})


def _size(
    config: Any, name: str, value: Any, default: Any, shrinking: Shrinking, layers: int
) -> Any:
    """Returns an attribute's new value; LEFT if the constructor derives it from others."""
    attributes = vars(config)
    if re.fullmatch(KEY_HEADS, name) and value == attributes.get("num_attention_heads"):
        return value and min(value, HEADS)  # keep key heads equal to query heads
    if isinstance(value, dict) and value and "rope" in name:
        sectioned = "mrope_section" in type(config).ignore_keys_at_rope_validation
        return _small_rope({"mrope_section": [2, 3, 3], **value} if sectioned else value)
    if name == "window_size" and "spatial_merge_size" in attributes:
        return value  # in pixels
    if _is_kinds(value) and len(value) > layers:
        return value[:layers] if shrinking.types or default is not None else LEFT
    if default is not None:
        return _number(name, value if type(value) is type(default) else default, shrinking, layers)
    if shrinking.types and isinstance(value, list) and value:
        return _number(name, value, shrinking, layers)
    return _open(name, layers) if shrinking.fills and value is None else LEFT


def _open(name: str, layers: int) -> Any:
    """Returns a size for an attribute that the defaults leave unset."""
    if name == "layer_types":
        return ["full_attention"] * min(layers, LAYERS)
    return OPEN.get(name, LEFT)


def _number(name: str, value: Any, shrinking: Shrinking, layers: int) -> Any:
    if KEPT.fullmatch(name):
        return value
    if type(value) is int:
        return shrinking.size(name, value, layers)
    if isinstance(value, list | tuple) and value:
        return type(value)(_number(name, v, shrinking, layers) for v in value)
    return value


def _layers(config: Any, shrinking: Shrinking) -> int:
    """Enough layers for each type to occur."""
    if shrinking.deep:
        return 10**9
    kinds = [value for value in vars(config).values() if _is_kinds(value)]
    last = [max(value.index(kind) for kind in set(value)) for value in kinds]
    return min(MOST_LAYERS, max([LAYERS, *(n + 1 for n in last)]))


def _is_kinds(value: Any) -> bool:
    """Whether the value lists one type name per layer."""
    return isinstance(value, list) and len(value) > LAYERS and all(type(v) is str for v in value)


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Sections of a head's frequencies that add up to a small head's."""
    new = {k: _small_rope(v) if isinstance(v, dict) else v for k, v in rope.items()}
    if sections := new.get("mrope_section"):
        part: Any = new.get("partial_rotary_factor", 1.0)
        half = int(HEAD * part) // 2
        others = [half // len(sections)] * (len(sections) - 1)
        new["mrope_section"] = [half - sum(others), *others]
    return new


def _id(name: str, value: Any, ids: dict[str, int]) -> Any:
    usual = next((i for head, i in USUAL_IDS.items() if name.startswith(f"{head}_")), None)
    small = ids[name] if usual is None else usual
    if isinstance(value, list | tuple):
        return type(value)(range(small, small + len(value)) if usual is None else [small])
    return value if value is None else small


def _ids(config: Any) -> set[str]:
    names = set()
    for name, _ in _fields(config):
        value = vars(config).get(name)
        if _is_config(value):
            names |= _ids(value)
        elif IDS.fullmatch(name):
            names.add(name)
    return names


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        factory = field.default_factory
        from_factory = None if factory is dataclasses.MISSING else factory()
        default = from_factory if field.default is dataclasses.MISSING else field.default
        if field.init and not field.name.startswith("_"):
            yield field.name, default


def _is_config(value: object) -> bool:
    return hasattr(type(value), "model_type") and dataclasses.is_dataclass(value)
