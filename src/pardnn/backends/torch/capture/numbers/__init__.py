"""Python numbers in a trace: which are symbols, how Python used them, what changes them."""
