"""A profile report as text, as HTML and as a figure."""
