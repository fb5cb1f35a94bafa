"""`pardnn report`: a plan as one page to look at in a browser, offline."""
