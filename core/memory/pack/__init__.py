"""The expert pack: a model imported once, whose experts are read from disk one at a time. docs/pack.md has the format.

This package does not depend on transformers: a pack is bytes, described by its manifest.
"""

from core.memory.pack.manifest import Manifest, pack_at
from core.memory.pack.manifest_json import PackFile
from core.memory.pack.reader import PackReader
from core.memory.pack.verify import check, verify
from core.memory.pack.writer import PackWriter
from core.memory.pages import PAGE, aligned

__all__ = ["PAGE", "Manifest", "PackFile", "PackReader", "PackWriter", "aligned", "check", "pack_at", "verify"]
