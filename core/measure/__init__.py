"""Runs a loaded model to measure it: calibration, and what lossy options cost and gain."""
