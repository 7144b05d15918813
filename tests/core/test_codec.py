"""Everything that the core sees and decides on survives as JSON, and nothing else is taken for it."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core import codec
from supervisord.core.codec import DecodeError, EncodeError
from supervisord.core.messages import Booted, Due, Exited, Observation, Reconfigured, Sampled, What
from supervisord.core.model import Node, Ready, Reason, Sample
from supervisord.core.spec import EngineSpec, NodeSpec
from tests.core.play import engine_spec, node_spec, ready
from tests.core.tales import TALES

OBSERVATIONS = typing.get_args(Observation)


def through(value: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(value, allow_nan=False))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint; what the configuration refuses (nan in flags) is left out."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
        return st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
    if origin in (typing.Union, types.UnionType):
        flags = str in args and float in args
        return st.one_of([FLAG_FLOATS if flags and arg is float else values(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[1:] != (Ellipsis,):
        return st.tuples(*map(values, args))
    if origin in (tuple, frozenset):
        return st.lists(values(args[0]), max_size=3).map(origin)
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=8), values(args[1]), max_size=3)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(cast("type", hint), **{f.name: values(hints[f.name]) for f in fields(hint)})
    return st.sampled_from(list(hint)) if isinstance(hint, type) and issubclass(hint, Enum) else PLAIN[hint]


FLAG_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN: Mapping[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False) | st.integers(-5, 5),
    str: st.text(max_size=20),
}


def hidden(spec: NodeSpec) -> NodeSpec:
    """The same configuration with nothing in the environments but names, and without webhooks."""
    return replace(spec, notify={}, engines={name: hidden_engine(engine) for name, engine in spec.engines.items()})


def hidden_engine(spec: EngineSpec) -> EngineSpec:
    return replace(spec, env=dict.fromkeys(spec.env, codec.HIDDEN))


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.one_of([values(kind) for kind in OBSERVATIONS]))
def test_every_observation_comes_back_as_it_was(seen: Observation) -> None:
    back = codec.decode_observation(through(codec.encode_observation(seen)))
    if isinstance(seen, Reconfigured):
        seen = replace(seen, spec=hidden(seen.spec))
    assert back == seen
    assert type(back) is type(seen)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(values(Node))
def test_every_node_comes_back_as_it_was(node: Node) -> None:
    back = codec.decode_node(through(codec.encode_node(node)))
    engines = {name: replace(engine, spec=hidden_engine(engine.spec)) for name, engine in node.engines.items()}
    assert back == replace(node, spec=hidden(node.spec), engines=engines)


@pytest.mark.parametrize("name", TALES)
def test_nodes_of_real_life_come_back(name: str) -> None:
    node = TALES[name]().node
    assert codec.decode_node(through(codec.encode_node(node))) == node


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_no_word_for(number: float) -> None:
    seen = Sampled("a", 1, Sample(at=1.0, prompt_tokens=number))
    back = codec.decode_observation(through(codec.encode_observation(seen)))
    assert isinstance(back, Sampled)
    found = back.sample.prompt_tokens
    assert found is not None
    assert repr(found) == repr(number)


def test_what_is_kept_of_an_environment_is_its_names() -> None:
    spec = node_spec(engine_spec("a", env={"HF_TOKEN": "hf_precious", "PLAIN": "http://user:precious@proxy"}))
    seen = Reconfigured(spec, {"a": "p"}, "uid 0")
    node = replace(ready().node, spec=spec)
    for text in (json.dumps(codec.encode_observation(seen)), json.dumps(codec.encode_node(node))):
        assert "precious" not in text
        assert "HF_TOKEN" in text


def test_the_form_is_small_and_readable() -> None:
    assert codec.encode_observation(Due(What.POLL)) == {"is": "Due", "what": "poll"}
    assert codec.encode_observation(Booted()) == {"is": "Booted"}
    seen = Exited("a", 3, 0, None, ("bye",))
    assert codec.encode_observation(seen) == {
        "is": "Exited",
        "engine": "a",
        "generation": 3,
        "code": 0,
        "signal": None,
        "tail": ["bye"],
    }


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "Due",
        {},
        {"is": "Nothing"},
        {"is": 7},
        {"is": ["Due"]},
        {"is": "Due"},
        {"is": "Due", "what": "tea"},
        {"is": "Due", "what": 1},
        {"is": "Due", "what": ["poll"]},
        {"is": "Due", "what": "poll", "more": 1},
        {"is": "Booted", "found": {}},
        {"is": "Booted", "found": [1]},
        {"is": "Spawned", "engine": "a", "generation": True, "process": {"pid": 1, "start_ticks": 1, "boot_id": "b"}},
        {"is": "Spawned", "engine": "a", "generation": 1, "process": {"pid": 1}},
        {"is": "Spawned", "engine": 1, "generation": 1, "process": {"pid": 1, "start_ticks": 1, "boot_id": "b"}},
        {"is": "Spawned", "engine": "a", "generation": 1.0, "process": None},
        {"is": "Sampled", "engine": "a", "generation": 1, "sample": {"at": "soon"}},
        {"is": "Sampled", "engine": "a", "generation": 1, "sample": {"at": 1, "running": "nan"}},
        {"is": "Sampled", "engine": "a", "generation": 1, "sample": {"at": 1, "kv_usage": True}},
        {"is": "Exited", "engine": "a", "generation": 1, "code": None, "signal": None, "tail": "bye"},
        {"is": "Reconfigured", "spec": {"engines": []}, "plan_ids": {}, "actor": "x"},
        {"is": "Reconfigured", "spec": {}, "plan_ids": {"a": 1}, "actor": "x"},
        {"is": "Reconfigured", "spec": {"gpu": {"persistence": "maybe"}}, "plan_ids": {}, "actor": "x"},
    ],
)
def test_what_no_encoder_wrote_is_refused(value: Any) -> None:
    with pytest.raises(DecodeError, match=r"^cannot "):
        codec.decode_observation(value)


@pytest.mark.parametrize(
    "seen",
    [
        Due("poll"),  # type: ignore[arg-type]
        Due(Ready()),  # type: ignore[arg-type]
        Ready(),
        Sampled("a", "1", Sample(at=1.0)),  # type: ignore[arg-type]
        Sampled("a", 1, Reason("a", "b")),  # type: ignore[arg-type]
        Sampled("a", 1, Sample(at=1.0, running=1.5)),  # type: ignore[arg-type]
        Exited("a", 1, 0, None, ["tail"]),  # type: ignore[arg-type]
        Reconfigured(NodeSpec(), [], "x"),  # type: ignore[arg-type]
        Reconfigured(node_spec(engine_spec(args={"a": {1: 2}})), {}, "x"),
        Reconfigured(node_spec(engine_spec(args={"a": {"b": object()}})), {}, "x"),
    ],
)
def test_what_is_not_as_its_hint_says_is_an_error_of_ours(seen: Any) -> None:
    with pytest.raises(EncodeError, match=r"^cannot "):
        codec.encode_observation(seen)


def test_arrays_inside_tables_come_back_as_lists() -> None:
    spec = node_spec(engine_spec(args={"a": {"b": [1, ({"c": None},)]}, "d": (1, "x")}))
    back = codec.decode_observation(through(codec.encode_observation(Reconfigured(spec, {}, "x"))))
    assert isinstance(back, Reconfigured)
    assert back.spec.engines["a"].args == {"a": {"b": [1, [{"c": None}]]}, "d": (1, "x")}


def test_a_type_without_a_coder_is_noticed_at_once() -> None:
    for hint in (set[int], tuple[int, set[str]], Mapping[int, str], int | complex):
        with pytest.raises(TypeError, match="no coder"):
            codec._coder(hint)


def test_tuples_of_a_fixed_length() -> None:
    coder = codec._coder(tuple[float | None, str])
    assert coder.encode((None, "x")) == [None, "x"]
    assert coder.decode([1.5, "x"]) == (1.5, "x")
    wrong: list[Any] = [(1.0,), [1.0, "x"], (1.0, "x", 2)]
    for value in wrong:
        with pytest.raises(EncodeError):
            coder.encode(value)
    wrong = [[1.0], (1.0, "x"), [1.0, "x", 2], ["x", 1.0]]
    for value in wrong:
        with pytest.raises(DecodeError):
            coder.decode(value)


def test_sets_of_texts_are_written_in_order() -> None:
    coder = codec._coder(frozenset[str])
    assert coder.encode(frozenset({"b", "a"})) == ["a", "b"]
    assert coder.decode(["a", "b"]) == frozenset({"a", "b"})
    with pytest.raises(EncodeError):
        coder.encode({"a"})
    with pytest.raises(DecodeError):
        coder.decode(["a", 1])
