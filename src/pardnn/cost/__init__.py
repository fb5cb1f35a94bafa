"""How long ops and messages take."""
