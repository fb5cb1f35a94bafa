"""What runs here: capture, steps on ranks, predictions beside measurements."""
