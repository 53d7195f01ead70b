"""What all three wings stand on: swapping a module's class, running and reading its code aside."""
