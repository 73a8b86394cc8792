"""Makes `wire_samples` importable (tests are imported without packages)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
