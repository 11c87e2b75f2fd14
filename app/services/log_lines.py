"""The newest lines of the log in memory, for the page. What stderr gets stays as it is."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from app.services.secret import HidingFormatter

MOST = 500
FORMAT = "%(asctime)s  %(levelname)-7s  %(message)s"


class LogLines(logging.Handler):
    """Thread-safe. Without secrets; as all of the log, without text of a conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(HidingFormatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        self._lines = deque[str](maxlen=MOST)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))
        stderr = logging.lastResort  # for records without a handler, which this one is no longer one of
        if stderr is not None and record.levelno >= stderr.level and logging.root.handlers == [self]:
            stderr.handle(record)

    def text(self) -> str:
        """The lines, the newest last."""
        return "\n".join([*self._lines])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Lines are kept until the end of the `with`: warnings of every package, of Moestro also what it chose."""
        own = logging.getLogger("moestro")
        before = own.level
        own.setLevel(logging.INFO)
        logging.root.addHandler(self)
        try:
            yield
        finally:
            logging.root.removeHandler(self)
            own.setLevel(before)
