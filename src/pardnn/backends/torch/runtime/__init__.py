"""One rank of a plan: its state, its action list, its memory limit."""
