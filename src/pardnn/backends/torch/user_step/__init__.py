"""The user's step: what it can reach, and where its values come from."""
