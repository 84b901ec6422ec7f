"""``python -m mofa``: the command line."""

import sys

from mofa.cli.main import main

sys.exit(main())
