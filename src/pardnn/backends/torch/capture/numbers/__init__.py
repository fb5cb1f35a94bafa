"""Python numbers in a trace: which are symbols, what Python asked of them, what changes them."""
