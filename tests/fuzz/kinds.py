"""Every kind of mutant by its name. What a kind needs is imported when it is made."""

from importlib import import_module

from tests.fuzz.mutant import Kind

# Name -> (module, class).
KINDS: dict[str, tuple[str, str]] = {
    "checkpoint": ("checkpoint", "Checkpoints"),
    "gguf": ("gguf_file", "GgufFiles"),
    "pack": ("pack", "Packs"),
    "trace": ("trace", "Traces"),
    "profile": ("profile", "Profiles"),
    "store": ("store", "Stores"),
    "request": ("request", "Requests"),
    "page": ("page", "Pages"),
}
# How much more often than others it is drawn.
WEIGHTS = {"checkpoint": 3, "gguf": 2, "pack": 2, "page": 2}
HIDDEN = {"planted": ("planted", "Planted")}  # for the tests of this package


def make(name: str) -> Kind:
    module, kind = (KINDS | HIDDEN)[name]
    made: Kind = getattr(import_module(f"tests.fuzz.{module}"), kind)()
    return made
