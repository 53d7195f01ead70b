"""Tiny models, one per kind of transformers attention that patch fuses."""

import torch
import transformers

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
LLAMA = {**PLAIN, "intermediate_size": 48, "num_key_value_heads": 2}
WINDOWED = {**LLAMA, "head_dim": 8, "sliding_window": 4}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
WHISPER |= {"encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 12}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
START = {"decoder_start_token_id": 1}

# name: (class, config, attention sites)
MODELS = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, LLAMA, 2),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config, WINDOWED, 2),
    "gpt_oss": ("GptOssForCausalLM", transformers.GptOssConfig,
                {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}, 2),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config,
             {"n_embd": 32, "n_head": 4, "n_layer": 2, **TOKENS}, 2),
    "bert": ("BertForMaskedLM", transformers.BertConfig,
             {**PLAIN, "intermediate_size": 48}, 2),
    "t5": ("T5ForConditionalGeneration", transformers.T5Config,
           {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            **TOKENS, **START}, 6),
    "whisper": ("WhisperForConditionalGeneration", transformers.WhisperConfig,
                {**WHISPER, **HEADS, **TOKENS, **START}, 6),
}  # fmt: skip


def build(name, config=None, **more):
    """Builds a model whose weights are so large that attention decides the next token."""
    cls, of, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config or of(**sizes, **more))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() > 1 or "sinks" in key:
                p.normal_(std=1.0 if "sinks" in key else 0.25)
    return model.eval()


def batch(name, side=None, length=9):
    """Returns a batch of two. side: where the second one is padded, None for no padding."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, length), generator=draw)
    if name == "whisper":
        sound = torch.randn(2, 8, 24, generator=draw)
        return {"input_features": sound, "decoder_input_ids": ids}
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, :3] = 0
        mask = mask if side == "left" else mask.flip(1)
    more = {"decoder_input_ids": ids.flip(1)[:, :7].contiguous()} if name == "t5" else {}
    given = {} if side is None else {"attention_mask": mask}
    return {"input_ids": ids.masked_fill(mask == 0, 0), **given, **more}
