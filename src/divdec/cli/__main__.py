"""`python -m divdec.cli`: the command `divdec`."""

import sys

from divdec.cli import main

sys.exit(main())
