"""PyTorch: capture a step, profile its ops, run a plan on ranks."""
