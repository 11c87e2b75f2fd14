"""Runs the predictor: its view of the model, its schedule, its worker process, and speculative execution."""
