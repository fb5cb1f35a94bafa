"""`pardnn run`: the launcher, the processes of ranks and reference, and the files between them."""
