"""Deferred initialisation: building a model so that a rank allocates only its shards."""
