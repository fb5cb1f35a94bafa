"""TDL descriptions of ATen's operators, one file per family."""
