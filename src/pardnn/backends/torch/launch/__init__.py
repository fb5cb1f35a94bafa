"""`pardnn run`: the launcher, the processes of ranks and reference, what they pass each other."""
