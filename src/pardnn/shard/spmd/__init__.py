"""SPMD partitioning: from a sharding to a complete plan."""
