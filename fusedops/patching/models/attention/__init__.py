"""Attention: which modules use transformers' AttentionInterface, and what they call instead."""
