"""Whether traffic may be sent to the node as a whole: what gateways ask.

Of one engine its state says that: a degraded one is ready (it serves), a draining one is not.
"""

from __future__ import annotations

from supervisord.core.model import Node, State


def of_node(node: Node) -> State:
    """READY when every wanted engine is, and there is one; else the state of the first that is not, as configured."""
    states = [engine.state for engine in node.engines.values() if engine.wanted]
    return next((state for state in states if state is not State.READY), State.READY if states else State.STOPPED)
