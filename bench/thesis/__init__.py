"""The tables and figures of the ParDNN thesis, regenerated."""
