"""Routing traces: which experts each token chose, layer by layer. Recorded, kept on disk, imported, read in pieces."""

from core.profile.trace.chunk import ArrayTrace, Chunk, Trace
from core.profile.trace.file import FileTrace, TraceHead, TraceWriter
from core.profile.trace.outside import open_trace

__all__ = ["ArrayTrace", "Chunk", "FileTrace", "Trace", "TraceHead", "TraceWriter", "open_trace"]
