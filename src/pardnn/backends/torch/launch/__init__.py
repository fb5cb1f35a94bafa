"""`pardnn run`: the launcher, and the process of each rank."""
