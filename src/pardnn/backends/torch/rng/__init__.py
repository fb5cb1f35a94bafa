"""Random numbers of one device, on many ranks."""
