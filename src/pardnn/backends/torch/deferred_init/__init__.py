"""Building a model so that a rank allocates its share only."""
