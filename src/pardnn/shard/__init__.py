"""One op, all devices: descriptions of operators, their partitions, and the search over them."""
