"""Calibration: texts run through a loaded model, exactly, and what its routing and this machine are like."""
