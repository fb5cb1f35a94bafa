"""Why a plan is the way it is: waits, memory, and what other decisions would cost."""
