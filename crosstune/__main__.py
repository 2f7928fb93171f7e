"""`python -m crosstune`."""

import sys

from crosstune.cli import main

sys.exit(main())
