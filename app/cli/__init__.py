"""The commands behind `launch.py`, a module each. Heavy imports happen only when a command runs."""

import argparse
import errno
import os
import select
import sys
import traceback
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from typing import TextIO

from app.cli.parser import CommandParser
from app.cli.reference import PrintReference
from app.services.crash import describe
from app.services.secret import Secret, hide, hide_in_logs, hide_words
from app.start import installer
from app.start.commands import ALIASES, COMMANDS
from app.start.commands import MODULES as ELSEWHERE
from app.store import results
from app.store.home import data_dir
from app.store.private import open_private, private_folder
from core.errors import MoestroError
from core.system.command import COMMAND

WHERE = {name: ELSEWHERE.get(name, f"{__name__}.{name}{'_' if iskeyword(name) else ''}") for name in COMMANDS}
MODULES = {name: import_module(module) for name, module in WHERE.items() if find_spec(module.partition(".")[0])}
CLOSED = 141
TALKS = {"chat", "eval", "calibrate", "profile"}  # commands whose options contain texts


def build_parser(only: str = "") -> argparse.ArgumentParser:
    """The parser of every command; options for settings are generated from the registry. With the name of a command in
    `only`, the others have no options: a process parses one command line."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        epilog="Without a command, the dashboard opens; --version prints the version. Chats, figures, profiles and "
        f"settings are kept in {data_dir()}; the environment variable MOESTRO_HOME names another folder.",
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
            usage=f"{COMMAND} {name} [options]",
        )
        if only in ("", name):
            module.add_arguments(command)
            command.close()
        command.set_defaults(run=module.run)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line: no command means `ui`, and unknown options of `test` are passed to pytest."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--help-all")):
        words.insert(0, "ui")
    name = ALIASES.get(words[0], words[0])
    parser = build_parser(only=name if name in MODULES else "")
    args, rest = parser.parse_known_args(words)
    if args.command == "test":
        args.pytest = rest
    elif rest:
        # names alone: a value may be a secret, given to an option that is misspelt
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")] or rest
        parser.error(f"{args.command} does not know {' '.join(unknown)}. See {COMMAND} {args.command} --help.")
    return args


def main(arguments: Sequence[str]) -> int:
    """Run one command. Exit codes: 0 good, 1 failed, 2 not possible as requested, 130 stopped by Ctrl-C, 141 (as of
    programs that SIGPIPE ends) the output was closed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a character missing from the console's encoding must not end an answer
            stream.reconfigure(errors="replace")
    hide_in_logs()
    try:
        code = _run(arguments)
    except OSError as error:  # stderr is closed
        if not reader_left(error):
            raise
        return CLOSED
    return CLOSED if reader_left() else code


def _run(arguments: Sequence[str]) -> int:
    args = argparse.Namespace()
    try:
        args = parse(arguments)
        if installer.INSTALLED:
            results.FOLDERS[1:] = [data_dir() / "bench" / "results"]
        return int(args.run(args))
    except MoestroError as error:
        print(hide(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and reader_left(error):
            return CLOSED
        given = list(vars(args).values())
        what = "" if any(isinstance(one, Secret) for one in given) else hide(str(error))
        where = write_log(error, arguments, given)
        print(f"Unexpected error: {what or type(error).__name__}\n{where}", file=sys.stderr)
        return 1


def reader_left(error: OSError | None = None) -> bool:
    """Whether what was written to stdout or stderr did not arrive, as their other end is closed (`| head -1`), or
    `error` is of that. What is written there afterwards, at the interpreter's end too, is thrown away."""
    left = False
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: started without
        try:
            stream.flush()
            if error is None or not _is_closed(stream, error):
                continue
        except OSError:
            pass
        left = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    return left


def _is_closed(stream: TextIO, error: OSError) -> bool:
    """Whether a stream's reader is gone; a failed write of much text leaves nothing to flush."""
    if error.errno not in (errno.EPIPE, errno.EINVAL):  # Windows has the latter
        return False
    if not hasattr(select, "poll"):
        return not stream.isatty() and error.filename is None
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in poll.poll(0))
    except OSError:  # no file of the system
        return False


def write_log(error: Exception, words: Sequence[str] = (), given: Iterable[object] = ()) -> str:
    """Append the traceback to the log in the data directory and return a line saying where; return the traceback if
    that fails. `words`: the command line, of which `given` are the values of the options.

    Neither contains text of a conversation nor a secret: error messages that may quote one are left out."""
    given = list(given)
    private = bool(TALKS.intersection(words[:1])) or any(isinstance(one, Secret) for one in given)
    text = hide(describe(error) + "\n" if private else "".join(traceback.format_exception(error)))
    try:
        log = data_dir() / "moestro.log"
        private_folder(log.parent)
        with open_private(log, "ab") as file:
            known = hide_words(words, given) if given else [word for word in words[:1] if word in COMMANDS]
            command = " ".join(known)
            file.write(
                f"--- {datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}  {COMMAND} {command}\n{text}".encode(
                    "utf-8", "replace"
                )
            )
    except (OSError, MoestroError):
        return text
    return f"The details are in {log}"
