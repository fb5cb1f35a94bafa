"""Second calls of ops: our search beside CP-SAT and checkpoints of every block."""
