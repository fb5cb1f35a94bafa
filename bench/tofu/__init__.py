"""The tables and figures of the Tofu paper, regenerated, and what else shows its search."""
