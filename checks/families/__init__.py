"""Checks `fusedops.patch` on a tiny model per transformers family: `python -m checks families`.

Each transformers family gets a model with random weights, from a config shrunk by its attributes'
names. The check runs it, patches it with all of patch's defaults, runs it again, and unpatches it.
Outputs, loss, the logits of generated tokens and all gradients must meet `patch(verify=...)`'s
criterion; after unpatch, all bits, classes and names must be as before.
"""
