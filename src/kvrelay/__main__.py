"""``python -m kvrelay``."""

import sys

from kvrelay.cli import main

if __name__ == "__main__":
    sys.exit(main())
