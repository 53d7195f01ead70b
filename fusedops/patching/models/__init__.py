"""Fuses attention, experts and losses through transformers' own interfaces."""
