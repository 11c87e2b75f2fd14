"""A process that hears all that it is told, until its end, and does nothing."""

import sys

from core.prediction.worker.process import behave

if __name__ == "__main__":
    behave()
    sys.stdin.buffer.read()
