"""Every invariant is shown to bite: a core with one small mistake is driven by the same machine, and is found out."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from supervisord.core.messages import Booted
from tests.core.invariants import STEP_INVARIANTS, WORLD_INVARIANTS, InvariantError
from tests.core.mutants import Mutant, load
from tests.core.play import engine_spec, new_node, node_spec
from tests.core.test_machine import SETTINGS, NodeMachine
from tests.core.world import Core, Luck, World, core_of


def mutant(name: str, module: str, old: str, new: str, *caught_by: str) -> Mutant:
    return Mutant(name, module, old, new, frozenset(caught_by))


MUTANTS: Final = (
    mutant(
        "messages of the last generation are heard while the next is launched",
        "node",
        "if seen.generation != expected or of_launch is (engine.launching is None):",
        "if seen.generation != expected:",
        "stale_messages_change_nothing",
        "start_converges",
    ),
    mutant(
        "generations are not compared",
        "node",
        "if seen.generation != expected or of_launch is (engine.launching is None):",
        "if of_launch is (engine.launching is None):",
        "stale_messages_change_nothing",
    ),
    mutant(
        "what is left after SIGKILL is overlooked",
        "ending",
        "    if seen.remaining:\n        turn.put",
        "    if False:\n        turn.put",
        "rest_means_gone",
        "never_two_live_generations",
    ),
    mutant(
        "what an earlier daemon left is overlooked",
        "node",
        "        adoption.take_over(turn, left)",
        "        pass",
        "rest_means_gone",
        "forgotten_means_gone",
        "never_two_live_generations",
    ),
    mutant(
        "a leftover without its main process is not swept",
        "adoption",
        "        ending.kill(turn, engine, after, cause)",
        "        pass",
        "rest_means_gone",
        "forgotten_means_gone",
        "never_two_live_generations",
    ),
    mutant(
        "an engine is started after it was stopped",
        "ending",
        "    if phase.after is After.STOP or turn.node.ending or not engine.wanted:\n",
        "    if phase.after is After.STOP:\n        admission.admit(turn, engine)\n    elif False:\n",
        "no_launch_while_ending_or_unwanted",
        "end_converges",
    ),
    mutant(
        "a stop leaves an engine in its back-off",
        "requests",
        '            turn.enter(engine, Stopped())\n            turn.record("stopped"',
        '            turn.record("stopped"',
        "an_unwanted_engine_goes",
    ),
    mutant(
        "the restart budget is not asked",
        "ending",
        "if len(times) <= spec.max_restarts:",
        "if True:",
        "restarts_stay_in_budget",
    ),
    mutant(
        "SIGKILL has no deadline",
        "lifecycle",
        "    yield phase.give_up_at\n",
        "",
        "transient_states_are_timed",
    ),
    mutant(
        "a drain is looked at without pause",
        "ending",
        "next_look_at=turn.now + DRAIN_LOOK_S",
        "next_look_at=phase.next_look_at",
        "the_clock_moves_on",
    ),
    mutant(
        "the port of another generation is watched",
        "starting",
        "turn.do(WatchPort(engine.spec.name, engine.generation))",
        "turn.do(WatchPort(engine.spec.name, engine.generation - 1))",
        "actions_name_the_living_generation",
    ),
    mutant(
        "an unknown number of requests is none",
        "ending",
        "idle = sample.running == 0 and sample.waiting == 0",
        "idle = not sample.running and not sample.waiting",
        "ends_only_on_evidence",
    ),
    mutant(
        "a request is not answered",
        "requests",
        '_accept(turn, seen, f"{name} is draining already")',
        "pass",
        "every_request_is_answered_once",
    ),
    mutant(
        "the daemon finishes at once",
        "node",
        "if turn.node.ending and (turn.node.keeping or not _holds_up(turn)):",
        "if turn.node.ending:",
        "finish_means_nothing_lives",
    ),
    mutant(
        "READY=1 is said again and again",
        "node",
        "    if at is None:\n        return\n",
        "    if at is None:\n        at = 0.0\n",
        "ready_is_said_once",
    ),
    mutant(
        "a changed launch plan is not applied to an engine that serves",
        "requests",
        "Starting | Warming | Ready | Waiting)",
        "Starting | Warming | Waiting)",
        "ready_runs_the_present_plan",
    ),
    mutant(
        "every look at a state begins it anew",
        "turn",
        "since = engine.since if new is engine.state else self.now",
        "since = self.now",
        "since_moves_with_the_state",
    ),
    mutant(
        "generations are counted twice",
        "starting",
        "generation=seen.generation,",
        "generation=seen.generation + 1,",
        "generations_only_grow",
    ),
    mutant(
        "a state is left in a way that the diagram does not know",
        "requests",
        "            ending.stop(turn, engine, After.STOP, cause, at_once=seen.at_once)\n",
        "            turn.put(replace(engine, phase=Stopped(), since=turn.now))\n",
        "states_follow_the_diagram",
        "rest_means_gone",
    ),
    mutant(
        "an engine is forgotten while it runs",
        "requests",
        "    engine = turn.put(replace(engine, removed=True, wanted=False))\n    if engine.live:",
        "    engine = turn.put(replace(engine, removed=True, wanted=False))\n    if not engine.live:",
        "forgotten_means_gone",
    ),
    mutant(
        "an operator's stop does not survive the daemon",
        "durable",
        '"wanted": engine.wanted,',
        '"wanted": True,',
        "what_was_saved_survives",
    ),
    mutant(
        "SIGKILL follows late",
        "ending",
        "kill_at = turn.now + spec.stop_timeout_s",
        "kill_at = turn.now + 9 * spec.stop_timeout_s",
        "stop_converges",
        "end_converges",
    ),
    mutant(
        "a start that was asked for is forgotten on the way",
        "requests",
        "turn.put(replace(engine, phase=replace(phase, after=After.START)))",
        "pass",
        "start_converges",
    ),
    mutant(
        "the daemon does not know that it ends",
        "requests",
        "turn.node = replace(turn.node, ending=True)",
        "pass",
        "end_converges",
    ),
    mutant(
        "a quarantine is overlooked",
        "gpu_inventory",
        "    if quarantine is not None and quarantine.quarantine is not None:",
        "    if False and quarantine is not None and quarantine.quarantine is not None:",
        "no_launch_on_a_gpu_that_must_not_be_used",
    ),
    mutant(
        "an engine is started somewhere else than it is configured for",
        "admission",
        "gpu_inventory.places(turn.node.gpus, gpus, counts_lost",
        "gpu_inventory.places(turn.node.gpus, list(turn.node.gpus.values())[-1:], counts_lost",
        "it_goes_where_it_is_configured",
    ),
    mutant(
        "two are started on one GPU",
        "admission",
        "e for e in sharing if e in starting or isinstance(e.phase, Stopping)",
        "e for e in sharing if isinstance(e.phase, Stopping)",
        "one_start_a_gpu",
    ),
    mutant(
        "memory is not waited for",
        "ending",
        "    if node.ending or not engine.devices or telemetry.off(node):\n",
        "    if True:\n",
        "memory_comes_back_first",
    ),
    mutant(
        "a third probe is started beside two that are stuck",
        "telemetry",
        "return telemetry.stuck < STUCK_MAX and telemetry.released_until is None",
        "return telemetry.released_until is None",
        "probes_are_few",
        "few_probes_live",
    ),
    mutant(
        "NVML is opened while it is released",
        "telemetry",
        "return telemetry.stuck < STUCK_MAX and telemetry.released_until is None",
        "return telemetry.stuck < STUCK_MAX",
        "probes_are_few",
    ),
    mutant(
        "a driver that fails has lost its GPUs",
        "gpus",
        "if sweep is None or sweep.problem is not None:",
        "if sweep is None:",
        "what_nobody_sees_hurts_nobody",
    ),
    mutant(
        "a GPU whose calls fail is lost",
        "gpus",
        "return _silent(replace(old, pci_id=new.pci_id or old.pci_id), new.index, new.error)",
        "return replace(old, absent_since=sweep.at - 99.0)",
        "what_nobody_sees_hurts_nobody",
    ),
    mutant(
        "a fault stops every engine",
        "gpu_faults",
        "        if ended or gpu.uuid not in",
        "        if ended or gpu.uuid in",
        "ends_only_on_evidence",
        "a_fault_stays_on_its_gpu",
    ),
    mutant(
        "back-off has no end",
        "ending",
        "case Backoff() if turn.now >= phase.until:",
        "case Backoff() if turn.now >= phase.until and engine.failures < 1:",
        "the_clock_moves_on",
    ),
)

BY_SCRIPT: Final = mutant(
    "a launch does not wait for the answer of the last",
    "starting",
    "            if engine.launching is None:\n                admission.admit(turn, engine)",
    "            if True:\n                admission.admit(turn, engine)",
    "one_launch_at_a_time",
)
"""Takes an hour of standing still, which the machine rarely has the patience for."""

BY_MACHINE: Final = settings(SETTINGS, max_examples=3000, phases=[Phase.generate])
NAMES: Final = {check.__name__ for check in (*STEP_INVARIANTS, *WORLD_INVARIANTS)} | {
    "forgotten_means_gone",
    "ready_is_said_once",
    "few_probes_live",
    "what_was_saved_survives",
    "stop_converges",
    "end_converges",
    "start_converges",
}


@pytest.mark.parametrize("mistake", MUTANTS, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_is_found_out(mistake: Mutant) -> None:
    machine = type("MutantMachine", (NodeMachine,), {"core": core_of(load(mistake))})
    with pytest.raises(InvariantError) as broken:
        run_state_machine_as_test(machine, settings=BY_MACHINE)
    assert broken.value.name in mistake.caught_by


def test_a_mistake_of_which_the_story_is_told() -> None:
    spec = node_spec(engine_spec(start_timeout_max_s=3600.0))
    for core, expected in ((Core(), None), (core_of(load(BY_SCRIPT)), "one_launch_at_a_time")):
        world = World(spec, {"a": "p1"}, core)
        world.perform(("a", "process"), Luck(outcome="gate"))
        world.deliver(("a", "process"))
        world.pass_time(6.0)
        if expected is None:
            world.pass_time(4000.0)
            continue
        with pytest.raises(InvariantError, match=expected):
            world.pass_time(4000.0)


def test_the_same_core_loaded_anew_is_whole() -> None:
    core = core_of(load(None))
    node = new_node(node_spec(engine_spec()))
    assert core.step(node, Booted(), 1.0)[0] is not node
    assert core.save(node)["a"]["wanted"]


def test_every_invariant_has_its_mutant() -> None:
    assert {name for mistake in (*MUTANTS, BY_SCRIPT) for name in mistake.caught_by} == NAMES
