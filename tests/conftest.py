"""Markers, and the sources on the path where the package is not installed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

# A busy machine is no fault of the code.
settings.register_profile("draftpool", deadline=None)
settings.load_profile("draftpool")

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = str(REPOSITORY / "src")
BESIDE_PYTHON = str(Path(sys.executable).parent)

sys.path.insert(0, SOURCES)
# Processes that tests start find the sources and the tools of this environment, activated or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([BESIDE_PYTHON, os.environ["PATH"]])
# A shell that runs tests in the background makes them, and so the processes they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "network: downloads what the cache does not hold")
    config.addinivalue_line("markers", "slow: takes minutes")
