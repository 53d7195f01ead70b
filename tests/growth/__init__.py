"""Tests that repeated calls do not grow memory; measures memory within a call."""
