"""Side-by-side measurements: every ratio within one run, medians of several rounds, the bound beside each figure."""
