"""Fuses residual sums with the norm that follows them."""
