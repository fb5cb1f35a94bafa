"""Code of a step that runs or not by data: where it ends, and what it leaves."""
