"""Code generation: what a rank runs in a step, as Python to read, to run and to debug."""
