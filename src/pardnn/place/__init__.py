"""Algorithms that put each op on one device."""
