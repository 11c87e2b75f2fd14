"""The dashboard under test: `python -m tests.browser.server PORT`, with MOESTRO_HOME set.

MOESTRO_TEST_ENGINE=real serves the real engine with the bundled demo model; otherwise the fake one. Ctrl-C ends it.
"""

from __future__ import annotations

import os
import sys

from app.host import Host
from app.serve import Asked, serve
from core.config import LoadSpec
from core.types import Fit
from tests.fakes import FakeEngine, fake_estimate


def estimate(spec: LoadSpec) -> Fit:
    """The fake model is "demo"; anything else is looked at as the real engine would."""
    if spec.model != "demo":
        from core.fit import estimate as real

        return real(spec)
    return fake_estimate(spec)


def main() -> None:
    real = os.environ.get("MOESTRO_TEST_ENGINE") == "real"
    host = Host() if real else Host(engine=FakeEngine, estimate=estimate)
    serve(Asked(), port=int(sys.argv[1]), browser=False, keeper=host)


if __name__ == "__main__":
    main()
