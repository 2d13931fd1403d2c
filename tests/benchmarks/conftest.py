"""The benchmark scripts import each other by name, as Python does for `python benchmarks/<script>.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
