"""Cost and benefit of lossy options: a loaded model under a list of configurations, on the same questions and the same
text. `run.evaluate` is the entry point; nothing here depends on its callers."""
