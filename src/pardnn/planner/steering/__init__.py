"""What a user demands of a plan: kept, and told where demands are at odds."""
