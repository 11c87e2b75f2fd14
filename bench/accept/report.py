"""What a check of `launch.py accept` found so far: printed part by part, so that it is there whatever comes of the
check, and without parts for which no time is left."""

import json
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic
from typing import Any

NO_TIME = "no time was left for it"


class Report(dict[str, Any]):
    """Figures by name, each printed as a line of JSON when it is set; the lines of a check are taken together."""

    def __init__(self, until_s: float, within: str = "") -> None:
        """`until_s`, by time.monotonic: when all parts are to be over. `within`: the figure that these belong to."""
        super().__init__()
        self._until_s, self._within = until_s, within

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(json.dumps({self._within: self} if self._within else {name: value}), flush=True)

    def add(self, figures: Mapping[str, Any]) -> None:
        """Set several."""
        for name, value in figures.items():
            self[name] = value

    def in_time(self, names: Iterable[str]) -> Iterator[str]:
        """Of parts that are measured one after another, those that are over in time if they take as long as the longest
        so far. The others are said to be left out."""
        longest_s = 0.0
        for name in names:
            began_s = monotonic()
            if began_s + longest_s > self._until_s:
                self[name] = {"left_out": NO_TIME}
                continue
            yield name
            longest_s = max(longest_s, monotonic() - began_s)
