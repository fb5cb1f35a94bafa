"""Settings that steps of `test_guards` import in their own bodies."""

FACTOR = 1.0
