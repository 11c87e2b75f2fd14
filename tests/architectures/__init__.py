"""Which Mixture-of-Experts models of the installed transformers run here, and how exactly: tried, not claimed."""
