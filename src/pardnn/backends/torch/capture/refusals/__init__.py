"""Refusals of capture: errors that name the line, and what to write instead."""
