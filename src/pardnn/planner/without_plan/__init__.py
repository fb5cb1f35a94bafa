"""What a step would take without a plan of pardnn's."""
