"""TDL, the tensor description language (Tofu, section 4.1), and its interval analysis (4.2)."""
