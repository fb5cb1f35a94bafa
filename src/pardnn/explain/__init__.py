"""Why a plan is as it is: what waits, what holds memory, what other decisions would cost."""
