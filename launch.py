"""Moestro: run Mixture-of-Experts models that are larger than GPU memory.

`python launch.py` sets up what is missing and opens the dashboard with the bundled demo model. Add --help to a command
to list its options.
"""
# Standard library only, and readable by an old Python. When this Python lacks what a command needs, the command goes on
# inside `.venv` next to this file, which is made and filled first: see app/start/installer.py.
#
# A wheel installs this file, app/, core/, bench/ and assets/ as one folder, moestro/. There `command_line` is the
# command `moestro`, and nothing is made, installed or written: the requirements came with the wheel.

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent


def fail(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr)
    return code


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):
        return fail(f"Moestro needs Python 3.11 or newer; this is {sys.version.split()[0]}. Start it with a newer one.")
    from app.start import bare_help, installer

    if arguments[:1] == ["--version"]:
        print(f"Moestro {bare_help.version()}")
        return 0
    command = arguments[0] if arguments and not arguments[0].startswith("-") else "ui"
    if not bare_help.known(command):
        return fail(bare_help.unknown(command), 2)
    inside = Path(sys.prefix).resolve() == installer.VENV.resolve()
    lacking = installer.missing("ui" if installer.INSTALLED else command)
    if installer.INSTALLED and lacking:
        return fail(
            f"This copy of Moestro was installed without what it needs: {', '.join(lacking)}. Install it again, with "
            "the program that you installed it with."
        )
    if lacking or (inside and installer.UNFINISHED.exists()):
        answered = bare_help.answer(command, arguments)
        if answered:
            code, text = answered
            return fail(text, code) if code else print(text) or 0
        if not inside:
            return installer.enter_venv(arguments)
        if not installer.install(command):
            return fail("The installation did not finish; the reason stands above. Run the same command to continue.")
    from app.cli import main as run

    return run(arguments)


def end(code: int) -> NoReturn:
    """End the process now that all is closed: taking torch's and Gradio's modules apart would take a second more."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: started without
        try:
            stream.flush()
        except (OSError, ValueError):  # it has no reader any more
            pass
    atexit._run_exitfuncs()
    os._exit(code)


def command_line() -> NoReturn:
    """Run the command that this process was started with, and end the process."""
    sys.path.insert(0, str(ROOT))  # before anything else of these names in the environment
    try:
        code = main(sys.argv[1:])
    except SystemExit as error:  # of argparse
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else fail(str(error.code))
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        code = 130
    end(code)


if __name__ == "__main__":
    command_line()
