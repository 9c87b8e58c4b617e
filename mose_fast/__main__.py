"""``python -m mose_fast`` runs the command line."""

import sys

from mose_fast.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
