"""Plans with optimizer state on the host: of whole ops, and of ops that are cut."""
