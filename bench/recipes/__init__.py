"""Cuts of experts beside the planners."""
