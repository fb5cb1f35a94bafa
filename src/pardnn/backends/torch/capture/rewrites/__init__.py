"""Parts of torch that branch on data or change shape with it, rewritten for one fixed graph."""
