"""Point-to-point messages between ranks, the handshake before them, failure detection."""
