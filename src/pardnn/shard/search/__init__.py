"""Tofu's search for a sharding (section 5), and the algorithms that it is compared with."""
