"""Advice for a step: savings are predicted, and can then be measured."""
