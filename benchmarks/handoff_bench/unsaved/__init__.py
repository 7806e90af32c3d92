"""A hook in measured prefill engines: `handoff_bench.saving` says of each prompt whether it is saved.

The folder of this package comes first on the path of such an engine: Python runs its ``sitecustomize.py`` at the start.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
