"""``python -m molt_core.cli``."""

import sys

from molt_core.cli import main

sys.exit(main())
