"""Evidence of a step on a GPU. `live.py` runs the steps; what it calls is pure where it can be."""
