"""Which kinds of events people can ask to be told of, and by which names."""

from __future__ import annotations

from itertools import combinations

from supervisord.core.kinds import ALL, GROUPS, IMPORTANT, KINDS, UNSENT, named


def test_every_kind_is_in_one_group_besides_important_and_all() -> None:
    own = {name: set(kinds) for name, kinds in GROUPS.items() if name not in {ALL, IMPORTANT}}
    assert set().union(*own.values()) == KINDS == set(GROUPS[ALL])
    assert all(not (one & other) for one, other in combinations(own.values(), 2))
    assert set(GROUPS[IMPORTANT]) < KINDS
    assert not KINDS & UNSENT
    assert not KINDS & GROUPS.keys(), "a name is a kind or a group"


def test_names_stand_for_kinds() -> None:
    assert named(()) == frozenset()
    assert named(("ready", "configuration", "ready")) == {"ready", *GROUPS["configuration"]}
    assert named((ALL,)) == KINDS
