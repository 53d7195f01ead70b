"""One table of rows for each family of operators."""
