"""Model testers that transformers' tests need but its source distribution lacks.

A test of transformers is a method of its ModelTesterMixin. It takes a tiny config, a batch and
their sizes from a model tester, which the distribution on PyPI lacks. These follow transformers'
own: two layers of width 32, all classes of a family.
"""

import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers_suite.generation.test_utils import GenerationTesterMixin
from transformers_suite.test_modeling_common import ModelTesterMixin

BATCH, TOKENS, WORDS, WIDTH, LAYERS, HEADS = 13, 7, 99, 32, 2, 4
IDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
PLAIN |= {"intermediate_size": 37}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PICTURE, PATCH = 30, 2
PATCHES = (PICTURE // PATCH) ** 2
SOUND, MELS = 60, 80


def words(tokens: int = TOKENS) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, WORDS, (BATCH, tokens), generator=draw)


def mask(tokens: int = TOKENS) -> Tensor:
    """Returns a mask that pads every second row on the right."""
    seen = torch.ones(BATCH, tokens, dtype=torch.long)
    seen[::2, -2:] = 0
    return seen


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def text_inputs() -> dict[str, Tensor]:
    return {"input_ids": words(), "attention_mask": mask()}


def pair_inputs() -> dict[str, Tensor]:
    return {**text_inputs(), "decoder_input_ids": words().flip(1), "decoder_attention_mask": mask()}


def image_inputs() -> dict[str, Tensor]:
    return {"pixel_values": numbers(BATCH, 3, PICTURE, PICTURE)}


def audio_inputs() -> dict[str, Tensor]:
    ids = words().flip(1)
    return {"input_features": numbers(BATCH, MELS, SOUND), "decoder_input_ids": ids}


LABELS = {
    "BertForPreTraining": {"labels": (BATCH, TOKENS), "next_sentence_label": (BATCH,)},
    "WhisperForConditionalGeneration": {"labels": (BATCH, TOKENS)},
}


def with_labels(
    case: Any, inputs: dict[str, Any], model: type, return_labels: bool = False
) -> dict[str, Any]:
    """The mixin's method, plus labels for classes that it leaves to a family's test case."""
    inputs = ModelTesterMixin._prepare_for_class(case, inputs, model, return_labels)
    shapes = LABELS.get(model.__name__, {}) if return_labels else {}
    return inputs | {name: torch.zeros(s, dtype=torch.long) for name, s in shapes.items()}


@dataclass(frozen=True)
class Family:
    """A family to test. classes: the base model comes first.

    lengths: the sizes that tests compare shapes with. left: tests that the family's own test case
    skips or replaces, with the reason.
    """

    config: str
    sizes: dict[str, Any]
    classes: tuple[str, ...]
    batch: Callable[[], dict[str, Tensor]]
    lengths: dict[str, int] = field(default_factory=lambda: {"seq_length": TOKENS})
    switches: dict[str, Any] = field(default_factory=dict)  # of the mixin
    left: dict[str, str] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(
        "LlamaConfig",
        {**PLAIN, **IDS, "num_key_value_heads": 2, "max_position_embeddings": 512},
        (
            "LlamaModel",
            "LlamaForCausalLM",
            "LlamaForSequenceClassification",
            "LlamaForQuestionAnswering",
            "LlamaForTokenClassification",
        ),
        text_inputs,
    ),
    "bert": Family(
        "BertConfig",
        {**PLAIN, **IDS, **NO_DROPOUT, "type_vocab_size": 16, "max_position_embeddings": 512},
        (
            "BertModel",
            "BertLMHeadModel",
            "BertForMaskedLM",
            "BertForMultipleChoice",
            "BertForNextSentencePrediction",
            "BertForPreTraining",
            "BertForQuestionAnswering",
            "BertForSequenceClassification",
            "BertForTokenClassification",
        ),
        text_inputs,
    ),
    "t5": Family(
        "T5Config",
        {
            "d_model": WIDTH,
            "d_kv": WIDTH // HEADS,
            "d_ff": 37,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "relative_attention_num_buckets": 8,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            **IDS,
        },
        ("T5Model", "T5ForConditionalGeneration"),
        pair_inputs,
        {"seq_length": TOKENS, "encoder_seq_length": TOKENS, "decoder_seq_length": TOKENS},
        {"is_encoder_decoder": True},
        {"test_model_base_model_prefix": "no model is inside T5ForConditionalGeneration"},
    ),
    "vit": Family(
        "ViTConfig",
        {**PLAIN, **NO_DROPOUT, "image_size": PICTURE, "patch_size": PATCH, "encoder_stride": 2},
        ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
        image_inputs,
        {
            "seq_length": PATCHES + 1,
            "mask_length": PATCHES,
            "num_masks": PATCHES // 2,
            "image_size": PICTURE,
            "patch_size": PATCH,
        },
        {"test_resize_embeddings": False},
        {"test_model_get_set_embeddings": "its embeddings are of patches, not nn.Embedding"},
    ),
    "whisper": Family(
        "WhisperConfig",
        {
            "d_model": WIDTH,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "num_mel_bins": MELS,
            "max_source_positions": SOUND // 2,
            "max_target_positions": 40,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            **IDS,
        },
        ("WhisperModel", "WhisperForConditionalGeneration"),
        audio_inputs,
        {
            "seq_length": SOUND,
            "encoder_seq_length": SOUND // 2,
            "key_length": SOUND // 2,
            "decoder_seq_length": TOKENS,
            "decoder_key_length": TOKENS,
        },
        {"is_encoder_decoder": True},
        {
            "test_resize_embeddings_untied": "it reads input_ids, and Whisper has input_features",
            "test_resize_tokens_embeddings": "it reads input_ids, and Whisper has input_features",
        },
    ),
}


class ModelTester:
    """Provides the sizes and inputs that the mixin reads."""

    batch_size, hidden_size, is_training, num_choices, pad_token_id = BATCH, WIDTH, True, 4, 0
    num_hidden_layers, num_attention_heads = LAYERS, HEADS

    def __init__(self, family: Family) -> None:
        self.family = family
        vars(self).update(family.lengths)

    def get_config(self) -> Any:
        return getattr(transformers, self.family.config)(**self.family.sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Tensor]]:
        return self.get_config(), self.family.batch()


def case(family: Family) -> type:
    """Returns a family's test case: transformers' methods with our tester."""
    classes = tuple(getattr(transformers, name) for name in family.classes)

    def setUp(self: Any) -> None:
        self.model_tester = ModelTester(family)

    members = {"all_model_classes": classes, "setUp": setUp, "_prepare_for_class": with_labels}
    members |= family.switches
    members |= {test: unittest.skip(why)(lambda _: None) for test, why in family.left.items()}
    generates = any(model.can_generate() for model in classes)
    mixins = (ModelTesterMixin, *([GenerationTesterMixin] if generates else []))
    bases = (*mixins, unittest.TestCase)
    return type(family.classes[0], bases, {**members, "__module__": __name__})


globals().update({name: case(family) for name, family in FAMILIES.items()})
