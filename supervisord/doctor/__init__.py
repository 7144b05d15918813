"""What `vllm-supervisor doctor` looks at: the preconditions of a GPU machine for vLLM. It looks, and changes nothing.

`facts.py` gathers what several checks need, each source within a deadline; every check (`checks.py` lists them) is a
function of these facts; `examine.py` runs them so that one that hangs holds up no other. The system is reached through
`box.py` alone, which tests put another system in the place of.
"""
