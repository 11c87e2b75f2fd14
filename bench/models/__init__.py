"""Models that suites write themselves: random weights of any size, as a checkpoint, as packs, as GGUF files."""
