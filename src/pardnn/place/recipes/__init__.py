"""What experts do by hand, as functions: stages of a training step, and their schedules."""
