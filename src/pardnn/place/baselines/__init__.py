"""Placement algorithms that ParDNN is compared with."""
