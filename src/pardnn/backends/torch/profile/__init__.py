"""Measured costs: ops, ops in their context, links."""
