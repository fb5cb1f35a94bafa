"""The simulator: the time and memory of a plan, and what no plan can beat."""
