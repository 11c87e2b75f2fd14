"""Mutants of everything that Moestro reads, and what became of each: see `kinds.py` for what there is.

A mutant is a sample and a list of changes, drawn from (kind, seed). `python -m tests.fuzz --help` draws one, replays
one, or goes on for minutes; `launch.py test --fuzz MINUTES` is the same with progress. What was found lies in `seeds/`
and is replayed by the default suite.
"""
