"""The first step: what it creates, what later ones find, and whether they do the same."""
