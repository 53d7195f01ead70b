"""Sizes of tiny models of many architectures, by transformers' names."""

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEP = {"num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN = {"hidden_size": 32, "intermediate_size": 48, **DEEP, **TOKENS}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, **TOKENS}
VISION = {"hidden_size": 32, "intermediate_size": 48, **DEEP, "image_size": 16, "patch_size": 8}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
BART |= {"decoder_ffn_dim": 48, **HEADS, **TOKENS, "decoder_start_token_id": 1}

DECODERS = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": WIDE,
    "gemma": WIDE,
    "gemma2": {**WIDE, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WIDE, "query_pre_attn_scalar": 8},
    "phi": PLAIN,
    "phi3": GROUPED,
    "gpt2": GPT,
    "gpt_neox": {**PLAIN, "use_parallel_residual": False},
    "gptj": {**GPT, "rotary_dim": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, **DEEP, **TOKENS},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    "falcon": {"hidden_size": 32, **DEEP, **TOKENS},
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "granite": {**GROUPED, "residual_multiplier": 0.5},
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "nemotron": GROUPED,
    "glm4": WIDE,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {**WIDE, "num_local_experts": 4},
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, **TOKENS},
}
ENCODERS = {
    "bert": PLAIN,
    "roberta": PLAIN,
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 64},
    "electra": {**PLAIN, "embedding_size": 32},
    "albert": {**PLAIN, "embedding_size": 16},
    "deberta-v2": {**PLAIN, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "mpnet": PLAIN,
    "modernbert": {**PLAIN, "cls_token_id": 1, "sep_token_id": 2},
}
VISION_TOWERS = {
    "vit": VISION,
    "dinov2": VISION,
    "clip_vision_model": VISION,
    "siglip_vision_model": VISION,
    "convnext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "image_size": 32},
}
ENCODER_DECODERS = {
    "t5": {
        **{"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **TOKENS},
        **{"decoder_start_token_id": 0},
    },
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "marian": BART,
}
SPEECH = {
    "whisper": {**BART, "num_mel_bins": 4, "max_source_positions": 8},
    "wav2vec2": {
        **PLAIN,
        **{"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
        **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4},
        **{"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    },
}
