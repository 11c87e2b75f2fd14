"""How a command of this copy is called, for texts that name one."""

import sys


def called(started_as: str) -> str:
    """What stands before a command's name, by the program that was started: that of an installed copy, or a clone's."""
    name = started_as.replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
    return "moestro" if name == "moestro" else "python launch.py"


COMMAND = called(sys.argv[0])
