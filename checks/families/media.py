"""Makes random images and sounds in the formats that models accept."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Seen", "media", "unseen"]

SIDE, PATCH, FRAMES, SAMPLES = 32, 8, 2, 2400
LARGEST = 256  # longest side; larger images take minutes
PICTURES = "pixel_values", "pixel_values_videos", "flattened_patches"
SOUNDS = "input_features", "input_values", "audio_values"
Batch = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """A model's image and sound inputs, and the tokens [rows, n] that stand for them in text.

    type: these tokens' value in `mm_token_type_ids`.
    """

    batch: Batch
    tokens: Tensor
    type: int = 1


def media(model: Any, names: set[str], rows: int) -> Iterator[Seen]:
    """Yields inputs that the model may accept, the fullest first, finally none."""
    nothing = torch.zeros(rows, 0, dtype=torch.long)
    draws = torch.Generator().manual_seed(3)
    for kind, forms in (("image", _pictures), ("audio", _sounds)):
        for batch in forms(model, names, rows, draws):
            if not _required(model) - {"input_ids", *_text(names)} <= batch.keys():
                continue
            tokens = _stand_ins(model, kind, batch, rows)
            if tokens is not None:
                yield Seen(batch, tokens, 3 if kind == "audio" else 1)
            if "input_ids" not in names or tokens is None:
                yield Seen(batch, nothing)
    yield Seen({}, nothing)


def _text(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("decoder_")}


def _required(model: Any) -> set[str]:
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind in named}


def unseen(model: Any, batch: Batch) -> bool:
    """Whether a model that takes images or sounds gets none."""
    takes = inspect.signature(model.forward).parameters.keys() & {*PICTURES, *SOUNDS}
    return bool(takes) and takes.isdisjoint(batch)


# Images


def _pictures(model: Any, names: set[str], rows: int, draws: Any) -> Iterator[Batch]:
    configs = list(_configs(model.config))
    side = _first(configs, ("image_size", "img_size"), SIDE)
    high, wide = side if isinstance(side, list | tuple) else (side, side)
    if names.isdisjoint(PICTURES) or max(high, wide) > LARGEST:
        return
    depth = _first(configs, ("num_channels", "in_channels", "in_chans"), 3)
    pictures = torch.randn(rows, depth if type(depth) is int else 3, high, wide, generator=draws)
    if names.isdisjoint(("flattened_patches", "image_grid_thw", "spatial_shapes")):
        yield from _whole(pictures, configs, names, draws)
    elif "flattened_patches" in names:
        yield _flattened(pictures, configs, draws)
    else:
        yield from _patches(pictures, configs, names, draws)
        yield from _whole(pictures, configs, names, draws)


def _whole(pictures: Tensor, configs: list, names: set[str], draws: Any) -> Iterator[Batch]:
    """Yields one image per row, several, a video, three channels, and other sizes."""
    name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
    rows, depth, high, wide = pictures.shape
    sizes = {"image_sizes": torch.tensor([[high, wide]] * rows)}
    extra: Batch = sizes if "image_sizes" in names else {}
    yield {name: pictures, **extra}
    if extra:
        yield {name: pictures}
    several = pictures.unsqueeze(1).repeat(1, 2, 1, 1, 1)
    yield {name: several, **extra}
    yield {name: several[:, :1], **extra}
    frames = _first(configs, ("num_frames", "frames_per_clip"), FRAMES)
    yield {name: pictures.unsqueeze(1).repeat(1, frames, 1, 1, 1)}
    if depth != 3:
        yield {name: torch.randn(rows, 3, high, wide, generator=draws), **extra}
    for side in (64, 224):
        yield {name: torch.randn(rows, depth, side, side, generator=draws), **extra}


def _patches(pictures: Tensor, configs: list, names: set[str], draws: Any) -> Iterator[Batch]:
    """Rows of patches, and the numbers of patches vertically and horizontally."""
    rows, depth, high, wide = pictures.shape
    patch = _patch(configs)
    high, wide = max(2, high // patch), max(2, wide // patch)
    size = depth * patch * patch
    if "spatial_shapes" in names:
        shapes = torch.tensor([[high, wide]] * rows)
        patches = torch.randn(rows, high * wide, size, generator=draws)
        mask = torch.ones(rows, high * wide, dtype=torch.long)
        yield {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}
        return
    size *= _first(configs, ("temporal_patch_size",), 1)
    patches = torch.randn(rows * high * wide, size, generator=draws)
    grid = torch.tensor([[1, high, wide]] * rows)
    merged = {"image_merge_sizes": torch.ones(rows, dtype=torch.long)}
    merged = merged if "image_merge_sizes" in names else {}
    yield {"pixel_values": patches, "image_grid_thw": grid, **merged}


def _flattened(pictures: Tensor, configs: list, draws: Any) -> Batch:
    """Six patches, each preceded by its row and column."""
    size = pictures.shape[1] * _patch(configs) ** 2
    patches = torch.randn(len(pictures), 6, 2 + size, generator=draws)
    patches[:, :, :2] = torch.tensor([[1 + i // 3, 1 + i % 3] for i in range(6)])
    return {"flattened_patches": patches}


def _patch(configs: list) -> int:
    size = _first(configs, ("patch_size",), PATCH)
    return size[-1] if isinstance(size, list | tuple) else size


# Sounds


def _sounds(model: Any, names: set[str], rows: int, draws: Any) -> Iterator[Batch]:
    configs = list(_configs(model.config))
    if "input_values" in names or "audio_values" in names:
        name = "input_values" if "input_values" in names else "audio_values"
        yield {name: torch.randn(rows, SAMPLES, generator=draws)}
        yield {name: torch.randn(rows, 1, SAMPLES, generator=draws)}
        length = _first(configs, ("max_length",), 64)
        bins = _first(configs, ("num_mel_bins",), 16)
        yield {name: torch.randn(rows, length, bins, generator=draws)}
    if "input_features" in names:
        bins = _first(configs, ("num_mel_bins", "feature_size", "input_feat_per_channel"), 16)
        for length in (2 * _first(configs, ("max_source_positions",), 32), 64):
            lengths = torch.ones(rows, length, dtype=torch.long)
            marks = dict.fromkeys(("feature_attention_mask", "input_features_mask"), lengths)
            marks = {n: mask for n, mask in marks.items() if n in names}
            features = torch.randn(rows, bins, length, generator=draws)
            for mask in (marks, {}) if marks else ({},):
                yield {"input_features": features, **mask}
                yield {"input_features": features.transpose(1, 2).contiguous(), **mask}
        for width in (80, 160):
            yield {"input_features": torch.randn(rows, 32, width, generator=draws)}


# Placeholder tokens


def _stand_ins(model: Any, kind: str, batch: Batch, rows: int) -> Tensor | None:
    """One placeholder token per feature that the model computes; None if that is unknown."""
    token = _first(list(_configs(model.config)), _names_of_token(kind), None)
    features = _method(model, f"get_{kind}_features")
    if token is None or features is None:
        return None
    parameters = inspect.signature(features).parameters
    try:
        with torch.no_grad():
            output = features(**{k: v for k, v in batch.items() if k in parameters})
    except Exception:  # noqa: BLE001  a model's own code raises anything
        return None
    count = sum(t.shape[:-1].numel() for t in _tensors(output))
    return torch.full((rows, count // rows), token) if count else None


def _names_of_token(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}_token_{end}" for end in ("id", "index"))


def _method(model: Any, name: str) -> Any:
    owners = (model, getattr(model, "model", None))
    return next((m for owner in owners if callable(m := getattr(owner, name, None))), None)


def _tensors(output: Any) -> list[Tensor]:
    """Returns the feature tensors in a model's result: a tensor, several, or a pooled output."""
    if isinstance(output, Tensor):
        return [output]
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None or isinstance(output, list | tuple):
        return [t for part in (output if pooled is None else [pooled]) for t in _parts(part)]
    last = getattr(output, "last_hidden_state", None)
    return [] if last is None else [last]


def _parts(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    return [t for t in part if isinstance(t, Tensor)] if isinstance(part, list | tuple) else []


def _first(configs: list, names: tuple[str, ...], otherwise: Any) -> Any:
    """Returns the attribute from the first config that has it; parts come before the whole."""
    for config in configs:
        for name in names:
            value = vars(config).get(name)
            if value is not None:
                return value
    return otherwise


def _configs(config: Any) -> Iterator[Any]:
    parts = [v for v in vars(config).values() if hasattr(type(v), "model_type")]
    order = sorted(parts, key=lambda part: "text" in part.model_type)
    for part in order:
        yield from _configs(part)
    yield config
