"""Times and peaks of memory that `asv` follows over commits: products, fits, predictions and files."""

import sys
from pathlib import Path

# asv imports this folder as a package of its own, without PYTHONPATH.
sys.path.append(str(Path(__file__).parents[2]))
