"""Messages between ranks, and what ranks must agree on."""
