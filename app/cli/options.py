"""Command-line options for every setting, generated from the registry, and their conversion to checked values."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from app.cli.parser import CommandParser
from core.errors import SettingError
from core.settings.calibration import CalibrationSettings
from core.settings.config import Settings, general, params
from core.settings.loading import LoadSpec
from core.settings.migration import unknown
from core.settings.param import Param, Value, declared
from core.settings.preset import Preset
from core.settings.presets import PRESETS, preset
from core.settings.sampling import Sampling
from core.system.command import COMMAND

LIVE, LOAD, DRAW, TRAIN = "live:", "load:", "draw:", "train:"  # prefixes of generated options in the namespace


def add_settings(parser: CommandParser) -> None:
    """Add `--model`, and an option for each setting: those that are advanced, or that depend on another one, are rare.
    A variant's own parameters are given with `--set name=value`."""
    loading = parser.add_argument_group("model")
    loading.add_argument(
        "--model",
        metavar="NAME",
        help='"demo", or a folder with a model (default: demo; in the dashboard, the last one)',
    )
    _add(parser, loading, declared(LoadSpec), LOAD)
    live = parser.add_argument_group("settings")
    live.add_argument(
        "--preset",
        metavar="NAME",
        type=preset_named,
        help="the settings of a published system, or to calibrate, how its paper trains what it needs; other options "
        f"override them: {', '.join(p.name for p in PRESETS)} (default: chat and the dashboard begin on auto)",
    )
    _add(parser, live, general(), LIVE)
    add_pairs(
        live,
        f"set any setting by its full name, for example eviction.lcp.omega=64; `{COMMAND} settings` lists the names",
    )


def add_pairs(group: Any, help: str) -> None:
    """Add `--set NAME=VALUE`, which may be given more than once."""
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", type=pair, dest="pairs", help=help)


def add_json(group: Any) -> None:
    """Add `--json`, for commands that print a table as well."""
    group.add_argument("--json", action="store_true", help="end with the result as one line of JSON")


def add_overrides(group: Any, names: Iterable[str]) -> None:
    """Add an option for each of these settings; one that is not given is None, and then the preset's."""
    for param in map(params().__getitem__, names):
        group.add_argument(
            f"--{param.name.replace('_', '-')}",
            type=checked(param),
            metavar=_metavar(param),
            help=f"{_help(param)[:-1]}, or the preset's)",
        )


def add_sampling(parser: CommandParser) -> None:
    """Add an option for each sampling parameter."""
    _add(parser, parser.add_argument_group("sampling"), declared(Sampling), DRAW)


def add_calibration(parser: CommandParser) -> None:
    """Add an option for each calibration setting."""
    _add(parser, parser.add_argument_group("calibration"), declared(CalibrationSettings), TRAIN)


def spec(args: argparse.Namespace, *, calibrates: bool = False) -> LoadSpec:
    """The LoadSpec with its live settings; to calibrate, without the preset's, which may need the profile. Raises
    SettingError."""
    live = argparse.Namespace(**{**vars(args), "preset": None}) if calibrates else args
    return LoadSpec.checked(args.model or "demo", Settings(_given(live, LIVE)), **_given(args, LOAD))


def given(args: argparse.Namespace) -> tuple[str | None, dict[str, Value], dict[str, Value]]:
    """(model, loading choices, live settings) given on the command line, without defaults."""
    return args.model, _given(args, LOAD), _given(args, LIVE)


def sampling(args: argparse.Namespace) -> Sampling:
    """The sampling settings. Raises SettingError."""
    return Sampling.checked(**_given(args, DRAW))


def calibration(args: argparse.Namespace) -> CalibrationSettings:
    """The calibration settings: the preset's, and other options over them. Raises SettingError."""
    chosen: Preset | None = args.preset
    return CalibrationSettings.checked(**{**(chosen.calibration if chosen else {}), **_given(args, TRAIN)})


def assign(name: str, value: object) -> tuple[str, str, Value]:
    """Check one value by its setting's name; returns (its group, name, value). Raises SettingError."""
    groups: dict[str, Mapping[str, Param]] = {LIVE: params(), LOAD: declared(LoadSpec), DRAW: declared(Sampling)}
    for where, known in groups.items():
        if name in known:
            return where, name, known[name].check(value)
    raise unknown(name, (name for known in groups.values() for name in known))


def _add(parser: CommandParser, group: Any, known: Mapping[str, Param], where: str) -> None:
    for param in known.values():
        option = group.add_argument(
            f"--{param.name.replace('_', '-')}",
            dest=where + param.name,
            default=argparse.SUPPRESS,
            type=checked(param),
            metavar=_metavar(param),
            help=_help(param),
        )
        if param.advanced or param.active_when:
            parser.rare.append(option)


def checked(param: Param) -> Callable[[str], Value]:
    """A converter for argparse with the registry's error messages."""

    def convert(text: str) -> Value:
        try:
            return param.check(text)
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def pair(text: str) -> tuple[str, str, Value]:
    """Parse and check NAME=VALUE of any setting; returns the same as `assign`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, for example eviction.lcp.omega=64.")
    try:
        return assign(name.strip(), value.strip())
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _given(args: argparse.Namespace, where: str) -> dict[str, Value]:
    chosen = getattr(args, "preset", None) if where == LIVE else None
    named = dict(chosen.values) if chosen is not None else {}
    named |= {key.removeprefix(where): value for key, value in vars(args).items() if key.startswith(where)}
    return named | {name: value for place, name, value in getattr(args, "pairs", ()) if place == where}


def preset_named(name: str) -> Preset:
    """Converter for argparse: a preset by name."""
    try:
        return preset(name)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _metavar(param: Param) -> str:
    if param.type == "choice":
        return "{" + ",".join(param.choices) + "}"
    if param.type == "bool":
        return "{on,off}"
    return {"int": "N", "float": "X", "text": "TEXT"}[param.type]


def _help(param: Param) -> str:
    default = {True: "on", False: "off"}[param.default] if isinstance(param.default, bool) else param.default
    default = "none" if default == "" else default
    return f"{param.help} (default: {default}{param.unit and ' ' + param.unit})".replace("%", "%%")
