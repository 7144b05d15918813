"""Stories of real decisions: the core is played, and what it told is all that a story is made of.

How they look to people is in tests/adapters/test_cli_why.py, as golden files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisord.core import story
from supervisord.core.incident import Event, between, last_incident
from supervisord.core.messages import Booted, EndRequested, Exited, Op, Record, Severity, SpawnFailed
from supervisord.core.model import Engine, ExitClass, Found, Ready, Reason, State
from supervisord.core.story import Story, tell
from tests.core import tales
from tests.core.play import engine_spec, process
from tests.core.tales import QWEN, TALES, Tale, event_of


def texts(found: Story, section: str) -> list[str]:
    return [line.text for line in found.lines if line.section == section]


def record(kind: str, reason: str | None = None, generation: int | None = 1, **numbers: Any) -> Record:
    return Record(kind, f"qwen: {kind}", Severity.WARNING, QWEN, generation, reason, numbers)


def told(*records: Record, every_s: float = 10.0) -> list[Event]:
    return [event_of(one, n, 1000.0 + n * every_s, 50.0 + n * every_s) for n, one in enumerate(records, 1)]


# --- every story ------------------------------------------------------------------------------------------------------


ALL = {**TALES, **tales.GPU_TALES}


@pytest.mark.parametrize("name", ALL)
def test_a_story_is_short_and_in_order(name: str) -> None:
    found = ALL[name]().story()
    assert len(found.lines) <= 12
    order = ["SEEN", "RULE", "DONE", "NOW", "DO"]
    sections = [line.section for line in found.lines]
    assert sections == sorted(sections, key=order.index)
    assert {"NOW", "DO"} <= set(sections)
    assert all(sections.count(section) <= 4 for section in order)
    assert all(len(line.text) <= 320 for line in found.lines)
    assert found.headline
    assert "{" not in "".join(line.text for line in found.lines)


@pytest.mark.parametrize(
    ("name", "rule", "outcome", "headline"),
    [
        ("exit-zero", "exited", "ready", "4h20m ago: qwen ended by itself (exit code 0, crash); ready 22.4 s later"),
        ("killed", "exited", "starting", "qwen ended by itself (SIGKILL, crash); it is starting"),
        ("bad-configuration", "exited", "failed", "ended by itself (exit code 2, config); it has failed (config)"),
        ("no-such-program", "config", "failed", "qwen could not be started (config); it has failed (config)"),
        ("crash-loop", "exited", "failed", "it has failed (crash_loop)"),
        ("backing-off", "exited", "backoff", "it will be started again"),
        ("port-held", "port_held", "waiting", "qwen met a closed gate (port_held); it waits"),
        ("port-foreign", "port_held", "waiting", "qwen was ended (port_held); it waits"),
        ("restarted", "operator", "ready", "restart of qwen requested by uid 1000; ready 26.6 s later"),
        ("stopped", "operator", "stopped", "stop of qwen requested by uid 1000; it is stopped"),
        ("start-timeout", "start_timeout", "ready", "qwen was ended (start_timeout); ready 22.7 s later"),
        ("unkillable", "operator", "failed", "it has failed (unkillable)"),
        ("reloaded", "reload", "ready", "qwen was ended (reload); ready 22.4 s later"),
        ("uneventful", None, "ready", "qwen was never restarted"),
        ("gpu-lost", "gpu_fault", "waiting", "qwen was ended (gpu_fault); it waits"),
        ("gpu-mended", "gpu_fault", "ready", "qwen was ended (gpu_fault); ready"),
        ("gpu-released", "exited", "waiting", "qwen ended by itself (exit code 1, crash); it waits"),
        ("memory-held", "gpu_memory_held", "waiting", "qwen met a closed gate (gpu_memory_held); it waits"),
        ("memory-stays", "exited", "waiting", "qwen ended by itself (exit code 1, crash); it waits"),
        ("wrong-gpu", "wrong_gpu", "backoff", "qwen was ended (wrong_gpu); it will be started again"),
        ("stalled", "stalled", "ready", "qwen was ended (stalled); ready"),
    ],
)
def test_headline_rule_and_outcome(name: str, rule: str | None, outcome: str, headline: str) -> None:
    found = ALL[name]().story()
    assert (found.rule, found.outcome) == (rule, outcome)
    assert headline in found.headline


def test_numbers_stand_against_their_thresholds() -> None:
    assert "restarts in 3600 s: 1, max_restarts is 5; failures in a row: 1" in texts(tales.exit_zero().story(), "RULE")
    assert "restarts in 3600 s: 3, max_restarts is 3; failures in a row: 3" in texts(tales.crash_loop().story(), "RULE")
    # What a rule recorded with its verdict, and the decision that followed.
    events = told(
        record("ready"),
        record("verdict", "free_blocks", free=42, min=100, low_s=61.03, total=None),
        record("killing", "free_blocks"),
    )
    rules = texts(tell(QWEN, events, None, 0.0, 0.0), "RULE")
    assert rules == ["free_blocks: too few KV blocks are free, and it is not load", "free 42, min 100, low_s 61.03"]
    # A rule that this text knows nothing about.
    rules = texts(tell(QWEN, told(record("killing", "new_rule", limit=3)), None, 0.0, 0.0), "RULE")
    assert rules == ["new_rule: see the event", "limit 3"]


def test_a_gpu_fault_and_its_remedy() -> None:
    found = tales.gpu_lost().story()
    assert "Xid 79 (fallen off the bus)" in texts(found, "SEEN")[0]
    assert "nothing is started there until an operator clears it" in texts(found, "RULE")[0]
    assert texts(found, "DONE")[0] == (
        "SIGKILL to all of it; evidence, in the state directory: evidence/qwen.1.gpu_fault.txt"
    )
    assert texts(found, "NOW")[0].endswith("then: vllm-supervisor gpu clear GPU-0")
    assert "vllm-supervisor gpu clear GPU" in texts(found, "DO")[0]
    (again,) = texts(tales.gpu_mended().story(), "DO")
    assert again.startswith("nothing; if it happens again: mend the GPU as the reason says")


@pytest.mark.parametrize(
    ("name", "now", "do"),
    [
        (
            "memory-held",
            "",
            "end what holds the memory, or lower gpu-memory-utilization and reload; it goes on by itself",
        ),
        (
            "memory-stays",
            "pid 4711 (engine qwen) holds 70.0 GiB",
            "end what holds the memory, or lower gpu-memory-utilization and reload; it goes on by itself",
        ),
        ("gpu-released", "NVML is closed for 10 min by an operator", "mend the driver as the reason says"),
    ],
)
def test_the_gates_of_gpus_in_words(name: str, now: str, do: str) -> None:
    found = ALL[name]().story()
    assert now in texts(found, "NOW")[0]
    assert texts(found, "DO")[0].startswith(do)


def test_memory_that_stays_is_a_step_of_the_story() -> None:
    done = texts(tales.memory_stays().story(), "DONE")
    assert any("71,680 MiB of its pid 4711" in text for text in done)
    assert "pid 77 (python) holds 60.0 GiB" in texts(tales.memory_held().story(), "SEEN")[0]


def test_the_evidence_of_a_verdict_is_named_and_is_no_number() -> None:
    found = tales.stalled().story()
    assert texts(found, "DONE")[0] == (
        "SIGKILL to all of it; evidence, in the state directory: evidence/qwen.1.stalled.txt"
    )
    assert "evidence" not in "".join(texts(found, "RULE"))
    # A restart that drains first names it as well.
    events = told(
        record("ready"),
        record("verdict", "free_blocks", free=42, evidence="evidence/qwen.1.free_blocks.txt"),
        record("draining", "free_blocks"),
    )
    (done,) = texts(tell(QWEN, events, None, 0.0, 0.0), "DONE")
    assert done.startswith("out of traffic; requests in flight may finish; evidence, in the state directory: ")
    assert done.endswith("evidence/qwen.1.free_blocks.txt")


def test_the_first_look_at_the_gpus_is_no_incident() -> None:
    assert tales.serving(gpus=("GPU-0",)).story().headline == "qwen was never restarted"


def test_an_engine_that_is_degraded_has_advice_for_each_reason() -> None:
    tale = tales.serving(gpus=("GPU-0",))
    cooling = "look at its cooling and its power supply"
    for codes, do in (
        (("gpu_throttled",), [cooling]),
        (
            ("gpu_throttled", "new_code"),
            [f"gpu_throttled: {cooling}", "new_code: it serves, but NOW says what is wrong"],
        ),
    ):
        tale.change(QWEN, phase=Ready(found=tuple(Reason(code, "x") for code in codes)))
        found = texts(tale.story(), "DO")
        assert [text.partition("; its log")[0] for text in found] == do


def test_the_numbers_of_another_generation_are_not_taken() -> None:
    events = told(
        record("verdict", "stalled", still_s=300.0),
        record("killing", "stalled"),
        record("spawned", generation=2, pid=5),
    )
    events += [event_of(record("killing", "stalled", generation=2), 9, 2000.0, 1000.0)]
    assert texts(tell(QWEN, events, None, 0.0, 0.0), "RULE") == ["stalled: work is pending and nothing moves"]


def test_a_generation_is_ready_since_it_was_so_first() -> None:
    adopted = [record("spawned"), record("ready"), record("adopted"), record("ready"), record("exited", "exited")]
    assert "generation 1, ready 30.0 s before" in texts(tell(QWEN, told(*adopted), None, 0.0, 0.0), "SEEN")
    young = told(*adopted[:2], record("spawned", generation=2), record("exited", "exited", generation=2))
    assert "generation 2, started 10.0 s before" in texts(tell(QWEN, young, None, 0.0, 0.0), "SEEN")


def test_who_starts_a_stopped_engine_does_not_hear_how_long_it_was_ready_before() -> None:
    tale = tales.stopped().later(60)
    tale.ask(Op.START, QWEN)
    found = tale.story()
    assert found.headline.startswith("0.0 s ago: start of qwen requested")
    assert texts(found, "SEEN") == ["start of qwen requested by uid 1000"]


# --- which incident ---------------------------------------------------------------------------------------------------


def test_a_wait_that_is_over_does_not_hide_the_restart_before_it() -> None:
    tale = tales.exit_zero()
    tale.add(record("waiting", "max_parallel_starts")).later(5).add(record("ready"))
    assert tale.story().rule == "exited"
    tale.later(5).add(record("waiting", "port_held"))
    assert tale.story().rule == "port_held", "one that is not over is the news"


def test_a_wait_is_told_if_there_was_nothing_else() -> None:
    tale = tales.port_held()
    tale.on()
    found = tale.come_up().story()
    assert (found.rule, found.outcome) == ("port_held", "ready")
    assert "ready 41.3 s later" in found.headline or "later" in found.headline


def test_a_drain_that_was_taken_back_is_no_restart() -> None:
    tale = tales.exit_zero()
    tale.ask(Op.DRAIN, QWEN)
    assert tale.story().headline.startswith("0.0 s ago: drain of qwen requested by uid 1000; it is draining")
    assert texts(tale.story(), "DO") == ["back into traffic: vllm-supervisor start qwen"]
    tale.ask(Op.START, QWEN)
    assert tale.story().rule == "exited"


def test_a_new_verdict_on_what_was_started_again_is_a_new_incident() -> None:
    tale = tales.killed()
    tale.on()
    assert tale.story().rule == "start_timeout"
    assert "no progress for 600 s" in texts(tale.story(), "SEEN")[0]


def test_a_stop_and_the_start_after_it() -> None:
    tale = tales.stopped()
    assert texts(tale.story(), "DO") == ["when it is wanted again: vllm-supervisor start qwen"]
    tale.ask(Op.START, QWEN)
    assert tale.story().headline == "0.0 s ago: start of qwen requested by uid 1000; it is starting"
    assert (
        tale.come_up().later(60).story().headline
        == "1m21s ago: start of qwen requested by uid 1000; ready 21.3 s later"
    )


def test_the_daemon_that_ended_and_the_next_one() -> None:
    tale = tales.serving(drain_timeout_s=0)
    tale.see(EndRequested("SIGTERM")).see(Exited(QWEN, 1, 0, None), after=1).swept()
    assert tale.story().rule == "daemon_ending"
    tale.add(record("spawned", generation=2, pid=9)).later(20).add(record("ready", generation=2))
    found = tell(QWEN, tale.events, None, tale.now, tale.wall)
    assert found.outcome == "gone"
    assert found.headline == "21.0 s ago: qwen was ended (daemon_ending); ready 21.0 s later"
    assert texts(found, "NOW") == ["it was ready again as generation 2", "it is not configured any more"]
    assert texts(found, "DO") == ["nothing: it is not configured any more"]


def test_what_an_earlier_daemon_left() -> None:
    tale = Tale()
    tale.see(Booted((Found(QWEN, 3, None, ("pid 77 (VLLM::EngineCor)",)),)))
    found = tale.story()
    assert (found.rule, found.outcome) == ("leftover", "stopping")
    assert found.headline == "0.0 s ago: an earlier daemon left qwen behind; it is stopping"
    assert texts(found, "DONE") == ["is killed: left by an earlier daemon, its main process is gone"]


def test_an_exit_without_a_known_code() -> None:
    tale = tales.serving().end(None, None)
    assert tale.story().headline.startswith("0.0 s ago: qwen ended by itself (exit code unknown, crash)")
    tale = tales.serving().end(None, 64)
    assert tale.story().headline.startswith("0.0 s ago: qwen ended by itself (signal 64, crash)")


def test_a_spawn_that_fails_is_tried_again() -> None:
    tale = tales.booted().see(SpawnFailed(QWEN, 1, ExitClass.CRASH, "cannot start qwen: out of processes"))
    found = tale.story()
    assert (found.rule, found.outcome) == ("spawn_failed", "backoff")
    assert "restarts in 3600 s: 1, max_restarts is 5; failures in a row: 1" in texts(found, "RULE")
    assert "started again in" in texts(found, "NOW")[0]


def test_many_steps_are_cut() -> None:
    tale = tales.serving()
    tale.ask(Op.RESTART, QWEN)
    tale.on().on()
    for n in range(6):
        tale.add(record("waiting", f"gate{n}")).later(1)
    done = texts(tale.story(), "DONE")
    assert len(done) == 4
    assert done[0] == "out of traffic; requests in flight may finish"
    assert done[1].endswith("more steps: vllm-supervisor events --engine qwen")
    assert done[-1] == "waits: gate5"


# --- a history that does not reach back -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TALES)
def test_every_rest_of_a_history_makes_a_story(name: str) -> None:
    tale = TALES[name]()
    engine = tale.node.engines[QWEN]
    for first in range(len(tale.events) + 1):
        for known in (engine, None):
            found = tell(QWEN, tale.events[first:], known, tale.now, tale.wall)
            assert found.lines
            assert len(found.lines) <= 12


def test_nothing_on_record() -> None:
    engine = replace(Engine(spec=engine_spec(QWEN), plan_id="p"), generation=4, process=process(4))
    found = tell(QWEN, [], engine, 10.0, 1000.0)
    assert found.headline == "nothing is on record about a restart of qwen"
    assert found.outcome == State.STOPPED.value
    assert tell(QWEN, [], None, 10.0, 1000.0).headline == "nothing is on record about a restart of qwen"


def test_an_incident_that_began_before_the_history() -> None:
    events = told(record("restart", "exited", delay_s=0.0, failures=2, max_restarts=5, restarts_in_window=2))
    found = tell(QWEN, events, None, 0.0, 0.0)
    assert texts(found, "RULE")[-1] == "restarts: 2, max_restarts is 5; failures in a row: 2"
    assert texts(found, "DONE") == ["start again at once"]
    assert last_incident(told(record("spawned"), record("requested", "reset"), record("answering"))) is None


def test_time_between_events_survives_reboots_and_clocks() -> None:
    first = event_of(record("exited"), 1, 1000.0, 500.0, "boot 1")
    same = event_of(record("ready"), 2, 90.0, 530.0, "boot 1")
    other = event_of(record("ready"), 3, 1060.0, 4.0, "boot 2")
    assert between(first, same) == 30.0, "the wall clock was set back"
    assert between(first, other) == 60.0
    assert between(other, first) == 0.0


FINITE = st.floats(allow_nan=False, allow_infinity=False)
NODES = {name: TALES[name]() for name in TALES}
KINDS = [
    *("exited", "leftover", "adopted", "spawned", "answering", "ready", "restart", "failed", "waiting", "stopping"),
    *("draining", "drain_timeout", "killing", "stopped", "removed", "unkillable_gone", "requested", "verdict"),
]
REASONS = [None, "exited", "operator", "stop", "start", "reset", "restart", "port_held", "config", "x"]


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.lists(
        st.builds(
            record,
            st.sampled_from(KINDS),
            st.sampled_from(REASONS),
            st.integers(1, 3),
            **{name: st.none() | FINITE | st.text(max_size=3) for name in ("delay_s", "exit_class", "signal")},
        ),
        max_size=12,
    ),
    st.sampled_from([*TALES]),
)
def test_no_history_is_too_strange(records: list[Record], name: str) -> None:
    tale = NODES[name]
    found = tell(QWEN, told(*records), tale.node.engines[QWEN], tale.now, tale.wall)
    assert len(found.lines) <= 12
    document = story.document(found, lambda at: f"{at:.0f}")
    assert document["headline"] == found.headline
