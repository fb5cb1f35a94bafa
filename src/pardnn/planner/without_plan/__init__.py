"""What a step would take without a plan of ours."""
