"""From a placement to a complete plan: order, messages, memory."""
