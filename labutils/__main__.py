"""``python -m labutils``: the same as the ``labutils`` command."""

import sys

from labutils.cli import main

sys.exit(main())
