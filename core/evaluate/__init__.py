"""What lossy options cost and what they buy: a loaded model under a list of configurations, on the same questions and
the same text. `run.evaluate` is the entry; nothing here knows who asks."""
