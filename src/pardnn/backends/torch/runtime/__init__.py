"""One rank of a plan: its state, its action list, its random numbers, its memory limit."""
