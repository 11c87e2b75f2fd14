"""Gradio without its interface files: more than half of the time that importing it takes.

As each of its component classes is made, Gradio parses its own source and the `.pyi` file that it keeps for
editors. A dashboard needs none. Standard library only, as the package installs this before anything else is there.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MODULE, WRITES = "gradio.component_meta", "create_or_modify_pyi"


class _WithoutInterfaceFiles:
    """Finds `MODULE` where it is, and takes the function out once it has run."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if hasattr(module, WRITES):
                setattr(module, WRITES, lambda *of: None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def skip_interface_files() -> None:
    """From now on; whatever imported Gradio before keeps it as it is."""
    if _WithoutInterfaceFiles not in sys.meta_path:
        sys.meta_path.insert(0, _WithoutInterfaceFiles)
