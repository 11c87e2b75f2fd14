"""A command's parser with two helps: --help lists what is used often, --help-all every option."""

from __future__ import annotations

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """`rare`: the options that --help leaves out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rare: list[argparse.Action] = []

    def close(self) -> None:
        """Add --help-all, if there is more to list; the last option to be added."""
        if self.rare:
            self.add_argument("--help-all", action=_All, nargs=0, help=f"list {len(self.rare)} rarer options as well")

    def format_help(self) -> str:
        helps = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return self.format_all()
        finally:
            for action, text in zip(self.rare, helps, strict=True):
                action.help = text

    def format_all(self) -> str:
        """The help with every option."""
        return super().format_help()


class _All(argparse.Action):
    """Prints that, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.format_all(), end="")
        parser.exit()
