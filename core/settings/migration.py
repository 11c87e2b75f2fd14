"""Settings that an earlier version wrote, in the database or a trace, under today's names."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar, cast

from core.errors import SettingError
from core.settings.param import Value

V = TypeVar("V", bound=Value)
DISTANCES = {  # each predictor had a width, a floor and a distance of its own: what the distance was by default
    **dict.fromkeys(("all_next", "default_vectors", "estimator", "gate", "hybrid", "previous_token", "random"), 1),
    **dict.fromkeys(("recent", "request", "token_table", "transitions"), 1),  # token_table is gone
    "expert_map": 3,
    "routing_path": 4,
    "stride": 4,
}
SHARED = {"width": "width", "floor": "floor", "distance": "distance", "stride": "distance"}  # then, and now
GONE = (  # names that are left out
    "borrow",
    "norms",
    "regret_tokens",
    "record_lab",
    "eviction.lfu.half_life",
    "eviction.lfru.half_life",
    "predictor.recent.tokens",
    "predictor.random.seed",
    "predictor.transitions.half_life",
    "substitute.buddy.discount",
    "substitute.buddy.search_rank",
    "substitute.buddy.unique",
)

TELEMETRY = {"True": "on", "False": "off"}
BUDDY_LENGTHS = ("substitute.buddy.k_max", "substitute.buddy.search_rank")


def migrated(values: Mapping[str, V]) -> dict[str, V]:
    """A set of settings under today's names. Those that are gone are left out, and so is what was set for predictors
    other than the chosen one where all share a parameter now. Other names stay as they are."""
    kept: dict[str, V] = {}
    renamed: dict[str, V] = {}
    for name, value in values.items():
        predictor, param = _own(name)
        if param and predictor == values.get("predictor"):
            renamed |= {f"predictor.{new}": old for new, old in migrated_params(predictor, {param: value}).items()}
        elif not param and name not in GONE and not name.startswith("host_eviction."):
            kept[name] = value
    found = {**renamed, **kept}
    lengths = [values[name] for name in BUDDY_LENGTHS if str(values.get(name)).isdigit()]
    if len(lengths) > 1:  # only so many of a list were searched
        found[BUDDY_LENGTHS[0]] = min(lengths, key=int)
    if str(found.get("telemetry")) in TELEMETRY:  # it was a yes or no beside another one
        lab = str(found["telemetry"]) == "True" and str(values.get("record_lab")) == "True"
        found["telemetry"] = cast(V, "lab" if lab else TELEMETRY[str(found["telemetry"])])
    return found


def migrated_params(predictor: str, params: Mapping[str, V]) -> dict[str, V]:
    """The parameters of a predictor under today's names. A distance that is the predictor's own is left out: it is what
    no distance stands for."""
    if predictor not in DISTANCES:
        return dict(params)
    renamed = {SHARED.get(name, name): value for name, value in params.items()}
    if str(renamed.get("distance")) == str(DISTANCES[predictor]):
        del renamed["distance"]
    return renamed


def unknown(name: str, known: Iterable[str]) -> SettingError:
    """The error about a name that no setting has, with the nearest one."""
    names = list(known)
    nearest = next(iter(get_close_matches(name, names, 1)), "")
    meant = f" Did you mean {nearest}?" if nearest else ""
    return SettingError(f"There is no setting called {name!r}.{meant} Settings: {', '.join(names)}.")


def _own(name: str) -> tuple[str, str]:
    """(predictor, parameter) of a name that was a predictor's own and is shared now; ("", "") of any other."""
    kind, _, rest = name.partition(".")
    predictor, _, param = rest.partition(".")
    return (predictor, param) if kind == "predictor" and predictor in DISTANCES and param in SHARED else ("", "")
