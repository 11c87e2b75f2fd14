"""A command's parser. It has two helps: --help lists what is used often, --help-all every option and the words of other
programs for them, which it takes as well. An unknown option ends it with the nearest known one."""

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from app.start.option_aliases import UnknownOptionError, described, translated


class CommandParser(argparse.ArgumentParser):
    """`rare`: the options that --help leaves out. `passes_on`: unknown options are another program's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rare: list[argparse.Action] = []
        self.passes_on = False

    def close(self) -> None:
        """Add --help-all, the last option to be added."""
        more = f"{len(self.rare)} rarer options as well" if self.rare else "other programs' words for these options"
        self.add_argument("--help-all", action=_All, nargs=0, help=f"list {more}")

    def options(self) -> list[str]:
        """The names of all options, with their dashes."""
        return [*self._option_string_actions]

    # argparse's overloads cannot be repeated in an override.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        words = [*(args or ())]
        if not self.passes_on:
            try:
                words = translated(words, self.options())
            except UnknownOptionError as error:
                self.error(f"{error} {self.prog} --help-all lists them all.")
        return super().parse_known_args(words, namespace)

    def format_help(self) -> str:
        helps = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in zip(self.rare, helps, strict=True):
                action.help = text

    def format_all(self) -> str:
        """The help with every option, and other programs' words for them."""
        words = textwrap.fill(described(self.options()), 78)
        return super().format_help() + (f"\n{words}\n" if words else "")


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """A converter for argparse: a whole number within these bounds."""
    bounds = f" from {least} to {most}" if most is not None else f" above {least - 1}" if least else ""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{bounds}.")
        return int(text)

    return convert


def real(what: str, least: float = 0.0, most: float = 1e9) -> Callable[[str], float]:
    """A converter for argparse: a number within these bounds; `what` = that, in words."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}.")
        return number

    return convert


class _All(argparse.Action):
    """Prints that, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_all(), end="")
        parser.exit()
