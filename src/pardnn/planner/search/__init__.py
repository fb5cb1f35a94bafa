"""The search for a plan: algorithms in turn, local search, and what was tried."""
