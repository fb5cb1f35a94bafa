"""PyTorch: capture, profile and run."""
