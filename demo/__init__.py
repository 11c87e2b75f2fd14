"""Builds Moestro's bundled demo model: facts, corpus, training, evaluation, model card.

Of Moestro it uses the simulator of caches alone, for the card. It needs torch, transformers, tokenizers, safetensors
and a Python whose docstrings become the facts.
"""
