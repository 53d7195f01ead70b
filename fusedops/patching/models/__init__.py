"""Fuses attention and losses through transformers' own interfaces."""
