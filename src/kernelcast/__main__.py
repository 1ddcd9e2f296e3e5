"""``python -m kernelcast``"""

from __future__ import annotations

import sys

from kernelcast._start import main

if __name__ == "__main__":
    sys.exit(main())
