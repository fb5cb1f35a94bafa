"""Code generation: a rank's step as Python code to read, run and debug."""
