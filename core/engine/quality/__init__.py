"""Quality cost of lossy options: an answer's tokens, scored against the exact model while no request is active.

During an answer, the logits of a sample of its tokens are kept (`sample`). Afterwards the exact model reads prompt and
answer (`audit`), and the two are compared (`figures`). `saved` estimates how much waiting for copies was saved.
`report` holds the results, `interval` says how sure they are, and `meter` combines these parts for the engine.
"""
