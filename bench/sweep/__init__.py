"""Many models and idioms, each captured, placed, cut and compared with its eager self.

Cases are data: a group module holds `CASES`, factories by name that return `(step, args)` like an
entry point; `changes` holds patterns of values that change between two calls.
"""
