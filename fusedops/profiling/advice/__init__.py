"""Advises changes that save a step's time or memory; predicts and measures their savings."""
