"""Builds Moestro's bundled demo model: facts, corpus, training, evaluation, model card.

The package is independent of Moestro's engine: it needs torch, transformers, tokenizers, safetensors and a Python whose
docstrings become the facts.
"""
