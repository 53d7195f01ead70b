"""What would help a step, with a saving that is predicted by a formula and then measured."""
