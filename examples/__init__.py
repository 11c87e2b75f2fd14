"""Moestro's engine used as a library. Run each from the repository's folder: `python -m examples.NAME`."""
