"""Attention: which modules call transformers' AttentionInterface, and what they call instead."""
