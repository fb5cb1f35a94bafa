"""Tofu's search for a sharding (section 5), beside the algorithms that it is compared with."""
