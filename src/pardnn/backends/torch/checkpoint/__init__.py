"""Saving and loading the state of a training step that several ranks hold."""
