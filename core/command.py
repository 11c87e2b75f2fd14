"""How a command of this copy is called, for texts that name one."""

import sys

_started_as = sys.argv[0].replace("\\", "/").rpartition("/")[2].removesuffix(".exe")
COMMAND = "moestro" if _started_as == "moestro" else "python launch.py"
"""What stands before a command's name: of an installed copy, and of a clone."""
