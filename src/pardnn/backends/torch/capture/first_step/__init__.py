"""The first step: what it creates, what later ones find, and whether it does what they do."""
