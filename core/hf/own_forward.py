"""A `forward` of one module, in place of its class's."""

from collections.abc import Iterable

from torch import nn

OWN = "forward"  # attribute of a module that shadows its class's method


def restore(modules: Iterable[nn.Module]) -> None:
    """Give modules their classes' `forward` again."""
    for module in modules:
        vars(module).pop(OWN, None)
