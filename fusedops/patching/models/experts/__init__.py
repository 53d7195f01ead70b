"""Fuses the experts of models that use transformers' ExpertsInterface."""
