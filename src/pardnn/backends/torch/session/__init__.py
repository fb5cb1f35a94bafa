"""One state, many graphs: a step followed through shapes, flags and evaluations."""
