"""What launch.py answers before anything is installed: a command's options, out of docs/commands.md, and which option
or command was meant by an unknown word. Standard library only.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from app.start.commands import ALIASES, COMMANDS
from app.start.option_aliases import UnknownOptionError, command_meant, translated

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "commands.md"
HELPS = {"-h", "--help", "--help-all"}
HEAD = """Run Mixture-of-Experts models larger than GPU memory. Without a command, the dashboard opens; --help behind a
command lists its options.
"""


def known(command: str) -> bool:
    """Is it a command, or another word for one?"""
    return command in COMMANDS or command in ALIASES


def unknown(word: str) -> str:
    """What to say of a word that is no command."""
    text, meant = f"There is no command {word!r}.", command_meant(word, COMMANDS)
    if meant:
        text += f" Did you mean {meant}?"
    elif Path(word).exists():
        text += f" A model is opened by --model {word}."
    return f"{text} Commands: {', '.join(COMMANDS)}."


def version() -> str:
    """The version of Moestro, without an import of the engine."""
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / "core" / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found
    return found[1]


def answer(command: str, words: Sequence[str]) -> tuple[int, str] | None:
    """The exit code and the text with which a command line ends without packages: a help, or an option that the command
    does not have. None = it needs them."""
    if HELPS.intersection(words):
        return 0, _help(command, words[0])
    options = known_options(command)
    if options and command != "test":  # which passes unknown options on
        try:
            translated(words, options)
        except UnknownOptionError as error:
            return 2, f"{error} See launch.py {command} --help."
    return None


def known_options(command: str) -> list[str]:
    """The options of a command; empty without the reference."""
    return re.findall(r"`(--?[a-z][\w-]*)", section(command))


def section(command: str) -> str:
    """The part of the reference about a command; "" = there is none."""
    return _reference().partition(f"\n## {ALIASES.get(command, command)}\n")[2].partition("\n## ")[0].strip()


def _help(command: str, first: str) -> str:
    found = _reference() if first == "--help-all" else "" if first in HELPS else section(command)
    return found or "\n".join([HEAD, *(f"python launch.py {name:<10} {what}" for name, what in COMMANDS.items())])


def _reference() -> str:
    return REFERENCE.read_text(encoding="utf-8") if REFERENCE.is_file() else ""
