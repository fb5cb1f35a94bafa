"""Partition strategies of one operator call, and what each device then does."""
