"""`python -m divdec.cli`: the command `divdec`."""

import sys

from divdec.cli.app import main

sys.exit(main())
