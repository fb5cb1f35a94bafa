"""Deferred initialisation: building a model so that a rank allocates its shards only."""
