"""`settings`: prints the reference of every setting as Markdown, from the registry; saved as `docs/settings.md`."""

import argparse
from collections.abc import Mapping

from core.settings.calibration import CalibrationSettings
from core.settings.config import KINDS, general
from core.settings.loading import LoadSpec
from core.settings.param import Param, declared
from core.settings.presets import PRESETS
from core.settings.registry import same_as, shared, variants
from core.settings.sampling import Sampling

HEAD = """# Settings

Generated from the registry by `python launch.py settings`; `docs/settings.md` is this text.

Live settings act between two tokens, in the dashboard, with `/set name value` in a chat, and as options or
`--set name=value` on the command line. Loading settings act when a model is loaded, calibration settings when it is
calibrated: in the tab Calibrate, or as options of `calibrate`."""

PRESETS_HEAD = """Published systems as values of these settings: `--preset NAME` on the command line, or the menu at the
top of the dashboard's cache section and, in Advanced, the lists below it: published systems, and what they are compared
with. What a preset does not name of its parts has its default; budget, pins and link stay as they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    print(reference())
    return 0


def reference() -> str:
    """Every setting with its default, bounds, help and source."""
    known = general()
    parts = [HEAD, "## Live", _table(known)]
    for kind in KINDS:
        parts.append(f"## {known[kind].title}: `{kind}`")
        if of := same_as(kind):
            parts.append(
                f"The same as for [`{of}`](#{_anchor(f'{known[of].title}: {of}')}), each with the defaults of its "
                "parameters."
            )
            continue
        if common := shared(kind):
            parts.append(_table({f"{kind}.{name}": param for name, param in common.items()}))
        for variant in variants(kind):
            parts += [f"### `{variant.name}`: {variant.title}", f"{variant.help}\n\nSource: {variant.source}."]
            if uses := [f"`{variant.full_name(param)}`" for param in variant.params if param.shared]:
                parts.append(f"Uses {', '.join(uses)}.")
            if own := {variant.full_name(param): param for param in variant.params if not param.shared}:
                parts.append(_table(own))
    parts += ["## Presets", PRESETS_HEAD, _presets()]
    parts += ["## Sampling", _table(declared(Sampling)), "## Loading", _table(declared(LoadSpec))]
    parts += ["## Calibration", _table(declared(CalibrationSettings))]
    return "\n\n".join(parts)


def _anchor(heading: str) -> str:
    """The link to a heading, as GitHub makes it."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _presets() -> str:
    lines = ["| Preset | Sets | What it is | Source |", "|---|---|---|---|"]
    for one in PRESETS:
        sets = ", ".join(f"{name} = {_text(value)}" for name, value in one.settings.items())
        lines.append(f"| `{one.name}` | {sets} | {one.title}. {one.help} | {one.source} |")
    return "\n".join(lines)


def _table(rows: Mapping[str, Param]) -> str:
    lines = ["| Setting | Default | Bounds | What it does |", "|---|---|---|---|"]
    for name, param in rows.items():
        cells = (
            f"`{name}`",
            _text(param.default),
            _bounds(param),
            f"{param.title}. {param.help}" if param.title else param.help,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bounds(param: Param) -> str:
    if param.type == "choice":
        return ", ".join(param.choices)
    if param.type == "bool":
        return "on, off"
    if param.low is None or param.high is None:
        return "text" if param.type == "text" else "any number"
    return f"{_number(param.low)} to {_number(param.high)}{param.unit and ' ' + param.unit}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
