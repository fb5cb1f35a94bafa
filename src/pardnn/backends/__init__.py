"""Frameworks that capture a step and run a plan."""
