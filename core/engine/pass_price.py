"""What the experts of a pass add to its time, beside the number of its rows: as many as are visited, and as many as
have to be fetched. Learnt from how passes of as many rows differ from each other."""

from typing import NamedTuple

WEIGHT = 0.98  # of what was seen before, with each pass
DOUBT = 8.0  # passes that "experts add nothing" counts as


class Load(NamedTuple):
    """Experts of all layers that a pass visits, and those among them that the cache lacks when it begins."""

    experts: float
    missing: float


class PassPrice:
    """Times are multiples of what a pass of one row takes."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discard what was seen."""
        self._passes = 0.0
        self._sums = [0.0] * 5  # of squares and products: experts, missing, both, and each with the time
        self._slopes: tuple[float, float] | None = 0.0, 0.0

    def note(self, load: Load, times: float, usual: Load, usual_times: float) -> None:
        """A pass took `times`, where others of as many rows take `usual_times` with a load as `usual`."""
        experts, missing, more = load.experts - usual.experts, load.missing - usual.missing, times - usual_times
        products = experts * experts, missing * missing, experts * missing, experts * more, missing * more
        self._sums = [WEIGHT * old + new for old, new in zip(self._sums, products, strict=True)]
        self._passes = 1 + WEIGHT * self._passes
        self._slopes = None

    def more(self, load: Load, usual: Load) -> float:
        """How much longer a pass with such a load takes than one with the `usual` one."""
        if self._slopes is None:
            self._slopes = self._fitted()
        expert, missed = self._slopes
        return expert * (load.experts - usual.experts) + missed * (load.missing - usual.missing)

    def _fitted(self) -> tuple[float, float]:
        """Of an expert, and of a missing one beside that: least squares, drawn to 0 as by DOUBT passes, and not below
        0."""
        ee, mm, em, et, mt = self._sums
        doubt = 1 + DOUBT / self._passes
        ee, mm = doubt * ee, doubt * mm
        if ee * mm > em * em:
            expert, missed = (mm * et - em * mt) / (ee * mm - em * em), (ee * mt - em * et) / (ee * mm - em * em)
            if expert >= 0 and missed >= 0:
                return expert, missed
        alone = (max(0.0, et / ee) if ee else 0.0), (max(0.0, mt / mm) if mm else 0.0)
        return (alone[0], 0.0) if alone[0] * et > alone[1] * mt else (0.0, alone[1])


class Usual:
    """The mean load of passes of as many rows, about that of the latest `kept` ones."""

    def __init__(self, kept: int) -> None:
        self.load, self.passes, self._kept = Load(0, 0), 0, kept

    def note(self, load: Load) -> None:
        """Of one more."""
        self.passes += 1
        (experts, missing), weight = self.load, 1 / min(self.passes, self._kept)
        self.load = Load(experts + weight * (load.experts - experts), missing + weight * (load.missing - missing))
