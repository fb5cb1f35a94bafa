"""Measured costs: of ops alone, of ops in their context, of messages between ranks."""
