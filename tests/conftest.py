"""Tests import each other's helper modules by name; nothing else is shared."""

import sys
from pathlib import Path

for folder in ("models", "engine"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
