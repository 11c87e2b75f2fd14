"""Calibration: runs texts through a loaded model, exactly, and measures its routing and this machine."""
