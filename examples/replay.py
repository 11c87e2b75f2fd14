"""Replays a recorded trace through every eviction policy, with one of our own among them, and through Belady's bound:

python launch.py chat --record talk.trace --prompt "What does heapq.heappush do?"
python -m examples.replay talk.trace
"""

import sys
from pathlib import Path

from core.profile.trace import open_trace
from core.settings.registry import variants
from core.simulate import BELADY, Config, simulate
from examples import second_chance  # registers the policy

if __name__ == "__main__":
    trace = open_trace(Path(sys.argv[1]))
    slots = trace.layers * trace.experts // 2  # half of all experts fit
    policies = [one.name for one in variants("eviction")]
    results = simulate(trace, [Config(name, slots) for name in (*policies, BELADY)])
    for result in sorted(results, key=lambda found: found.hits):
        own = " (our own)" if result.config.policy == second_chance.NAME else ""
        print(f"{result.config.policy:<14} {result.hits / max(1, result.requests):.1%} hits{own}")
