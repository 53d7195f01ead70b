"""Advice for a step: each saving is predicted by a formula and can then be measured."""
