"""Checkpoints as files: the manifest, the pieces, the commit protocol. Knows no framework."""
