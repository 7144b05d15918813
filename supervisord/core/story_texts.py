"""The fixed sentences of a story, beside what `advice` says of codes. `{name}` is the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supervisord.core.advice import LOG

UNKNOWN: Final = "see the event"
NO_RULE: Final = "no rule, "
GATE: Final = "a closed gate: it waits, which costs no restart budget, and looks again by itself"

WAIT: Final = "nothing: it goes on by itself"
FOLLOW: Final = "nothing yet: vllm-supervisor status {name} --watch"
BACKOFF: Final = (
    f"nothing yet, it is started again by itself (sooner: vllm-supervisor start {{name}}); what it said: {LOG}"
)
START: Final = "when it is wanted again: vllm-supervisor start {name}"
HELD: Final = "back into traffic: vllm-supervisor start {name}"
DEGRADED: Final = f"it serves, but NOW says what is wrong; its log: {LOG}"
EVIDENCE: Final = "; evidence, in the state directory: {file}"
WELL: Final = "nothing"
AGAIN: Final = "nothing; if it happens again: {advice}"
STATES: Final[Mapping[str, str]] = {"backoff": "it will be started again", "waiting": "it waits"}
"""Where "it is" does not fit in front of a state."""
GONE: Final = "nothing: it is not configured any more"
