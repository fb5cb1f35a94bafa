"""The models of the Tofu and ParDNN papers, one file each, as anybody would write them.

Every named size is an entry point (`FILE.py:FUNCTION`) with the keyword `batch_size`; `small` is
the same network at a size for tests, and `network` builds one without its training step.
"""
