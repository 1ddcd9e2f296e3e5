"""``python -m kernelcast``"""

from __future__ import annotations

import sys

from kernelcast.cli import main

sys.exit(main())
