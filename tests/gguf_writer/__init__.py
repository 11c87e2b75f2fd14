"""Tiny GGUF files, made of tiny checkpoints as llama.cpp's converter makes them (its conversion/*.py)."""
