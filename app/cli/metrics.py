"""`metrics`: prints the table of metrics as Markdown, from core.metrics; saved as `docs/metrics.md`."""

import argparse

from core.metrics import COUNTED, METRICS, Metric

HEAD = """# Metrics

Generated from `core/metrics/` by `python launch.py metrics`; `docs/metrics.md` is this text.

What is measured of each forward pass: a chunk of the prompt, or one decoded token. Each metric is a column of
`tokens.csv` in an export. *Stored*: it is also a column of the table `steps` in the database; the others follow from
the routing stored there. *Answer*: what becomes of it in the statistics of an answer; means and rates are over decoded
tokens, everything else is over all passes. *Live*: the frames that the dashboard draws have a timeline of it.

| Metric | Unit | What it is | Stored | Answer | Live |
|---|---|---|---|---|---|"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    print(reference())
    return 0


def reference() -> str:
    """The table of every metric, in the order of the exports."""
    return "\n".join([HEAD, *map(_line, METRICS)])


def _line(one: Metric) -> str:
    reduce = "" if one.reduce is None else one.reduce if isinstance(one.reduce, str) else " / ".join(one.reduce)
    marks = (one.column or one.name, one.unit or "yes or no", one.help, one in COUNTED, reduce, one.frame)
    name, *cells = ("yes" if cell is True else cell or "" for cell in marks)
    return "| " + " | ".join([f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |"
