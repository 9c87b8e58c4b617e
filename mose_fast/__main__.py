"""``python -m mose_fast`` is the command line as well."""

import sys

from mose_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
