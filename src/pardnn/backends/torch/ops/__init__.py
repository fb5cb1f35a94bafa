"""Calls as data, and data as calls."""
