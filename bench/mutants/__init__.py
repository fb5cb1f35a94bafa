"""Mutation testing: small faults planted one by one, and whether a test fails."""
