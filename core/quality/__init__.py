"""What lossy options cost in quality: tokens of an answer, scored against the exact model when nobody waits.

While an answer is written, the logits that a sample of its tokens was drawn from are kept (`sample`). Afterwards the
exact model reads prompt and answer (`audit`), and the two are compared (`figures`). Beside it stands how much waiting
for copies was saved (`saved`). `told` is what came of it, and `meter` holds it together for the engine.
"""
