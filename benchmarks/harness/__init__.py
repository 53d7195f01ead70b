"""The benchmark harness: times, checks and reports rows."""
