"""Residual sums followed by a norm: both become one operator."""
