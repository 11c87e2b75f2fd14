"""Loads the demo model with half of its experts in the cache, and streams an answer: `python -m examples.answer`."""

from core.engine import Engine
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling

QUESTION = "What does heapq.heappush do?"

engine = Engine.load(LoadSpec.checked("demo", Settings({"budget": "50%", "eviction": "lfu"})))
try:
    for piece in engine.generate([{"role": "user", "content": QUESTION}], Sampling.checked(max_new_tokens=64)):
        print(piece.text, end="", flush=True)
        if (stats := piece.stats) is not None:  # the last piece
            print(f"\n{stats.tok_s:.0f} tokens/s, hit rate {stats.hit_rate:.0%}, exact: {stats.exact}")
finally:
    engine.unload()
