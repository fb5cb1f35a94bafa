"""Code of a step that runs depending on data: where it ends, and what it leaves."""
