"""Measures a step's time and memory, finds its bottleneck, and advises on savings."""
