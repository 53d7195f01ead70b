"""Residual sums that are followed by a norm: both become one operator."""
