"""Times, checks and reports benchmark rows."""
