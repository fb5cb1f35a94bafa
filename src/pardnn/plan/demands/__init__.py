"""What users demand of a plan: layouts by tensor and axis, and the checker of all demands."""
