"""The judge: what a plan costs, and what no plan can beat."""
