"""Finds sites by reading the lines of a module's forward."""
