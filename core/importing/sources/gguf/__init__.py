"""GGUF, llama.cpp's format: one file with weights, config and tokenizer."""

from core.importing.sources.gguf.source import GgufSource, open_gguf

__all__ = ["GgufSource", "open_gguf"]
