"""`pardnn export`: plans and runs in the formats of other tools."""
