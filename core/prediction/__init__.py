"""Runs the predictor: what it sees of the model, when it is asked, its worker process, speculative execution."""
