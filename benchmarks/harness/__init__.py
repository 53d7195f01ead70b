"""How rows are timed, judged and reported."""
