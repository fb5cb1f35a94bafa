"""Python numbers in a trace: which are symbols, how Python uses them, and what changes them."""
