"""The benchmark harness: times operations, checks their results and reports both."""
