"""The little that manual pages need of roff."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from supervisord import __version__


def roff(text: str) -> str:
    """Text as roff takes it."""
    plain = text.replace("%%", "%").replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain


def title_line(name: str, section: int, volume: str) -> str:
    """The first line of a page, of today or of $SOURCE_DATE_EPOCH."""
    made = time.gmtime(float(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    return f'.TH {roff(name)} {section} {time.strftime("%Y-%m-%d", made)} "vllm-supervisor {__version__}" "{volume}"'
