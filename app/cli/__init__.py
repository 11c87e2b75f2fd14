"""The commands behind `launch.py`, a module each. Heavy imports happen only when a command runs."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from keyword import iskeyword

from app.cli.parser import CommandParser
from app.cli.reference import PrintReference
from app.commands import ALIASES, COMMANDS
from app.services.crash import describe
from app.store.home import data_dir
from app.store.private import open_private, private_folder
from core.errors import MoestroError

MODULES = {name: import_module(f"{__name__}.{name}_" if iskeyword(name) else f"{__name__}.{name}") for name in COMMANDS}
TALKS = {"chat", "eval", "calibrate", "profile"}  # commands whose options contain texts


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; options for settings are generated from the registry."""
    parser = argparse.ArgumentParser(
        prog="launch.py",
        epilog="Without a command, the dashboard opens. Chats, figures, profiles and settings are kept in "
        f"{data_dir()}; the environment variable MOESTRO_HOME names another folder.",
        description="Run Mixture-of-Experts models larger than GPU memory.",
    )
    parsers: dict[str, CommandParser] = {}
    parser.add_argument(
        "--help-all",
        action=PrintReference,
        nargs=0,
        const=parsers,
        help="print the reference of all commands as Markdown",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=CommandParser)
    for name, module in MODULES.items():
        what = COMMANDS[name]
        parsers[name] = command = commands.add_parser(
            name,
            aliases=[word for word, meant in ALIASES.items() if meant == name],
            help=what,
            description=what,
            allow_abbrev=False,
            usage=f"launch.py {name} [options]",
        )
        module.add_arguments(command)
        command.close()
        command.set_defaults(run=module.run)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line: no command means `ui`, and unknown options of `test` are passed to pytest."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--help-all")):
        words.insert(0, "ui")
    parser = build_parser()
    args, rest = parser.parse_known_args(words)
    if args.command == "test":
        args.pytest = rest
    elif rest:
        parser.error(f"{args.command} does not know {' '.join(rest)}. See launch.py {args.command} --help.")
    return args


def main(arguments: Sequence[str]) -> int:
    """Run one command. Exit codes: 0 good, 1 failed, 2 not possible as asked, 130 stopped by Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a character missing from the console's encoding must not end an answer
            stream.reconfigure(errors="replace")
    try:
        args = parse(arguments)
        return int(args.run(args))
    except MoestroError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        print(f"Unexpected error: {error or type(error).__name__}\n{write_log(error)}", file=sys.stderr)
        return 1


def write_log(error: Exception) -> str:
    """Append the traceback to the log in the data directory and print a line saying where; print the traceback if that
    fails.

    Neither contains prompt text: the --prompt option is left out, and so are error messages that may quote it.
    """
    talks = bool(TALKS.intersection(sys.argv[1:2]))
    text = describe(error) + "\n" if talks else "".join(traceback.format_exception(error))
    log = data_dir() / "moestro.log"
    try:
        private_folder(log.parent)
        with open_private(log, "ab") as file:
            asked = " ".join(without_prompt(sys.argv))
            file.write(
                f"--- {datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}  {asked}\n{text}".encode("utf-8", "replace")
            )
    except OSError:
        return text
    return f"The details are in {log}"


def without_prompt(words: Sequence[str]) -> list[str]:
    """A command line without the value of --prompt."""
    hidden = [re.sub(r"^--prompt=.*", "--prompt=...", word, flags=re.DOTALL) for word in words]
    return ["..." if before == "--prompt" else word for before, word in zip(["", *words], hidden, strict=False)]
