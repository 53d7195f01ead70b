"""Fuses the attention of models that use transformers' AttentionInterface."""
