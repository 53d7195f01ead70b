"""Lists transformers' model families by kind of task, from its Auto classes."""

from typing import Any

__all__ = ["KINDS", "auto_class", "families"]

# kind -> the Auto classes that build it, and the tables of their families
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "causal": (("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM"),),
    "masked": (("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM"),),
    "seq2seq": (("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM"),),
    "audio": (
        ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
        ("AutoModelForCTC", "MODEL_FOR_CTC"),
        ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION"),
    ),
    "vision": (
        ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION"),
        ("AutoModelForVideoClassification", "MODEL_FOR_VIDEO_CLASSIFICATION"),
        ("AutoModelForObjectDetection", "MODEL_FOR_OBJECT_DETECTION"),
        ("AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION"),
        ("AutoModelForDepthEstimation", "MODEL_FOR_DEPTH_ESTIMATION"),
    ),
    "multimodal": (("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"),),
    "base": (("AutoModel", "MODEL"),),  # families that are in no kind above
}


def families(kind: str) -> dict[str, str]:
    """family -> the Auto class that builds it; each family once per kind."""
    auto_classes: dict[str, str] = {}
    for auto, table in KINDS[kind]:
        for family in _table(table):
            auto_classes.setdefault(family, auto)
    if kind == "base":
        other_families = {f for other in KINDS if other != "base" for f in families(other)}
        auto_classes = {f: auto for f, auto in auto_classes.items() if f not in other_families}
    return dict(sorted(auto_classes.items()))


def auto_class(kind: str, family: str) -> Any:
    """Returns the Auto class that builds a family of a kind."""
    import transformers

    return getattr(transformers, families(kind)[family])


def _table(name: str) -> dict[str, object]:
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, f"{name}_MAPPING_NAMES")
