"""How Moestro's bundled demo model is made: facts, corpus, training, evaluation, model card.

The package knows nothing of Moestro's engine: it needs torch, transformers, tokenizers, safetensors and a Python
whose docstrings become the facts.
"""
