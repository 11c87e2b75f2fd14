"""Side-by-side measurements: every ratio within one run, medians of several rounds, each figure with its bound."""
