"""Constraints on a plan: how they are met, and reported if they conflict."""
