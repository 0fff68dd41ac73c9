"""Run the command line as ``python -m cgdnn``."""

import sys

from cgdnn.cli.main import main

sys.exit(main())
