"""`vllm-supervisor` and `python -m supervisord`."""

from __future__ import annotations

import sys

from supervisord.cli import main

if __name__ == "__main__":
    sys.exit(main())
