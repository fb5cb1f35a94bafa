"""Planning from an earlier plan: what of it still holds, and a search near it."""
