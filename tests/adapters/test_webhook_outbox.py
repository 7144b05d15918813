"""What waits for a receiver, at times that the test owns."""

from __future__ import annotations

import json

import pytest

from supervisord.core.messages import Record, Severity
from supervisord.webhook.notice import MESSAGE_CHARS, Notice, body
from supervisord.webhook.outbox import ASKED_MAX_S, GIVE_UP_S, QUEUE_MAX, RETRY_MAX_S, Outbox, Outcome, Stats

OK = Outcome(ok=True, detail="HTTP 204")
DOWN = Outcome(ok=False, detail="no connection: connection refused", again=True)
REFUSED = Outcome(ok=False, detail="HTTP 404: no_service")


def outbox(repeat_s: float = 300.0, jitter: float = 1.0) -> Outbox:
    return Outbox("notify.ops", "https://example.com/...", repeat_s, lambda: jitter)


def notice(number: int = 1, kind: str = "exited", engine: str | None = "qwen", **fields: object) -> Notice:
    told = Record(kind, f"message {number}", Severity.ERROR, engine, reason=str(fields.pop("reason", kind)))
    return Notice(f"d-{number}", 1000.0 + number, told)


def about(record: Record) -> Notice:
    return Notice("d-1", 1.0, record)


def told(box: Outbox) -> list[tuple[str, str]]:
    return [(record.kind, record.message) for record in box.news()]


def drain(box: Outbox, now: float) -> list[Notice]:
    """Everything that is due, delivered."""
    found = []
    while (one := box.take(now)) is not None:
        found.append(one)
        box.settle(OK, now)
    return found


# --- order and repetitions --------------------------------------------------------------------------------------------


def test_messages_are_sent_at_once_and_in_order() -> None:
    box = outbox()
    assert (box.take(0.0), box.wakeup()) == (None, None)
    for number, engine in enumerate("abc"):
        box.offer(notice(number, engine=engine), 0.0)
    assert [one.record.engine for one in drain(box, 0.0)] == ["a", "b", "c"]
    assert (box.stats(), told(box), box.wakeup()) == (Stats(delivered=3), [], None)


def test_of_repetitions_the_last_comes_at_the_end_with_their_number() -> None:
    box = outbox(repeat_s=300)
    for number in range(5):
        box.offer(notice(number), 10.0 * number)
    box.offer(notice(9, engine="other"), 45.0)
    assert [one.id for one in drain(box, 50.0)] == ["d-0", "d-9"]
    assert box.wakeup() == 300.0
    assert box.take(299.9) is None
    (last,) = drain(box, 300.0)
    assert (last.id, last.repeated) == ("d-4", 3)
    box.offer(notice(6), 301.0)
    assert box.take(302.0) is None, "that one opened a window of its own"
    assert [(one.id, one.repeated) for one in drain(box, 600.0)] == [("d-6", 0)]


@pytest.mark.parametrize("kind", ["failed", "gpu_quarantined"])
def test_what_only_a_person_ends_is_told_at_once_each_time(kind: str) -> None:
    """Reset at night, ready, failed again a minute later: whoever went back to bed must be woken."""
    box = outbox(repeat_s=3600)
    box.offer(notice(1, kind), 0.0)
    box.offer(notice(2, "ready"), 30.0)
    box.offer(notice(3, kind), 60.0)
    assert [one.id for one in drain(box, 60.0)] == ["d-1", "d-2", "d-3"]


def test_after_a_quiet_window_a_message_is_sent_at_once() -> None:
    box = outbox(repeat_s=300)
    box.offer(notice(1), 0.0)
    assert len(drain(box, 0.0)) == 1
    box.offer(notice(2), 300.0)
    assert [one.id for one in drain(box, 300.0)] == ["d-2"]


def test_without_a_window_everything_is_sent() -> None:
    box = outbox(repeat_s=0)
    for number in range(3):
        box.offer(notice(number), 0.0)
    assert len(drain(box, 0.0)) == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Record("exited", "a", engine="x", reason="r"), Record("exited", "b", engine="x", reason="r"), True),
        (Record("exited", "a", engine="x", reason="r"), Record("exited", "a", engine="x", reason="s"), False),
        (Record("exited", "a", engine="x", reason="r"), Record("failed", "a", engine="x", reason="r"), False),
        (Record("ready", "in 1 s", engine="x"), Record("ready", "in 2 s", engine="x"), True),
        (
            Record("gpu_quarantined", "", numbers={"gpu": "1"}),
            Record("gpu_quarantined", "", numbers={"gpu": "2"}),
            False,
        ),
        (Record("trouble", "cannot write a"), Record("trouble", "cannot write b"), False),
        (Record("trouble", "cannot write a"), Record("trouble", "cannot write a"), True),
    ],
)
def test_what_is_a_repetition(one: Record, other: Record, same: bool) -> None:
    box = outbox()
    box.offer(about(one), 0.0)
    box.offer(about(other), 0.0)
    assert len(drain(box, 0.0)) == (1 if same else 2)


# --- trying again -----------------------------------------------------------------------------------------------------


def pauses(box: Outbox, outcome: Outcome, times: int) -> list[float]:
    found, now = [], 0.0
    for _ in range(times):
        assert box.take(now) is not None
        box.settle(outcome, now)
        wakeup = box.wakeup()
        assert wakeup is not None
        assert box.take(wakeup - 0.001) is None
        found.append(wakeup - now)
        now = wakeup
    return found


def test_pauses_double_up_to_a_minute_with_jitter() -> None:
    for jitter, factor in ((1.0, 1.0), (0.0, 0.5)):
        box = outbox(jitter=jitter)
        box.offer(notice(), 0.0)
        expected = [factor * pause for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)]
        assert pauses(box, DOWN, 8) == pytest.approx(expected)


def test_a_receiver_may_ask_for_a_longer_pause_within_bounds() -> None:
    for asked_s, expected in ((0.1, 1.0), (17.0, 17.0), (1e9, ASKED_MAX_S)):
        box = outbox()
        box.offer(notice(), 0.0)
        assert pauses(box, Outcome(ok=False, detail="HTTP 429", again=True, wait_s=asked_s), 1) == [expected]


def test_an_outage_is_told_once_and_its_end() -> None:
    box = outbox()
    box.offer(notice(1), 0.0)
    box.offer(notice(2, engine="other"), 0.0)
    pauses(box, DOWN, 5)
    ((kind, text),) = told(box)
    assert kind == "notify_failing"
    assert text == (
        "cannot notify notify.ops (https://example.com/...): no connection: connection refused; it is tried again"
    )
    assert box.stats() == Stats(waiting=2, failing=True)
    assert [one.id for one in drain(box, 31.0)] == ["d-1", "d-2"]
    assert told(box) == [("notify_recovered", "notify.ops (https://example.com/...) takes messages again after 31 s")]
    assert box.stats() == Stats(delivered=2)


def test_given_up_after_an_hour() -> None:
    box = outbox()
    box.offer(notice(1), 0.0)
    now = 0.0
    while box.take(now) is not None:
        box.settle(DOWN, now)
        now = box.wakeup() or now
    assert GIVE_UP_S <= now <= GIVE_UP_S + 2 * RETRY_MAX_S
    assert box.stats() == Stats(failed=1, failing=True)
    assert [kind for kind, _ in told(box)] == ["notify_failing", "notify_lost"]
    box.offer(notice(2, engine="other"), now + RETRY_MAX_S)
    assert len(drain(box, now + RETRY_MAX_S)) == 1
    ((kind, text),) = told(box)
    assert (kind, text.endswith("; 1 was lost")) == ("notify_recovered", True)


def test_what_is_refused_is_not_tried_again_and_the_next_one_waits() -> None:
    box = outbox()
    box.offer(notice(1), 0.0)
    box.offer(notice(2, engine="other"), 0.0)
    assert box.take(0.0) is not None
    box.settle(REFUSED, 0.0)
    ((kind, text),) = told(box)
    assert kind == "notify_failing"
    assert text.endswith("HTTP 404: no_service; that message is lost")
    assert box.take(0.5) is None
    assert [one.id for one in drain(box, 1.0)] == ["d-2"]
    assert box.stats() == Stats(delivered=1, failed=1)
    assert told(box)[0][1].endswith("takes messages again after 1 s; 1 was lost")


def test_other_settings_are_tried_at_once() -> None:
    box = outbox()
    box.offer(notice(1), 0.0)
    pauses(box, DOWN, 7)
    box.configure("https://other.example/...", 0)
    assert box.take(1.0) is not None
    box.settle(OK, 1.0)
    assert "https://other.example/..." in told(box)[-1][1]


# --- too much, and the end --------------------------------------------------------------------------------------------


def test_the_oldest_give_way_and_are_counted() -> None:
    box = outbox()
    for number in range(QUEUE_MAX + 40):
        box.offer(notice(number, engine=f"e{number}"), 0.0)
    assert box.stats() == Stats(dropped=40, waiting=QUEUE_MAX)
    ((kind, text),) = told(box)
    assert kind == "notify_lost"
    assert text.endswith(f" are lost: {QUEUE_MAX} wait for it already, the oldest give way")
    assert [one.id for one in drain(box, 0.0)] == [f"d-{number}" for number in range(40, QUEUE_MAX + 40)]
    assert told(box) == [
        ("notify_recovered", "notify.ops (https://example.com/...) takes messages again; 40 were lost")
    ]


def test_what_is_being_sent_does_not_give_way() -> None:
    box = outbox()
    box.offer(notice(0), 0.0)
    taken = box.take(0.0)
    for number in range(1, QUEUE_MAX + 2):
        box.offer(notice(number, engine=f"e{number}"), 0.0)
    box.settle(DOWN, 0.0)
    assert box.take(5.0) is taken
    assert box.stats().dropped == 1


def test_the_end_hurries_and_then_counts_what_is_left() -> None:
    box = outbox()
    box.offer(notice(1), 0.0)
    pauses(box, DOWN, 6)
    box.offer(notice(2), 100.0)
    told(box)
    box.hurry(100.0)
    assert box.take(100.0) is not None, "the pause is cut short"
    box.settle(OK, 100.0)
    assert [one.id for one in (box.take(100.0),) if one] == ["d-2"], "and so is the wait for repetitions"
    box.close()
    box.settle(OK, 101.0)
    assert box.stats() == Stats(delivered=1, failed=1)
    assert [kind for kind, _ in told(box)] == ["notify_recovered", "notify_lost"]
    box.close()
    assert told(box) == []


# --- the message ------------------------------------------------------------------------------------------------------


def test_what_a_receiver_gets() -> None:
    numbers = {"code": 1, "signal": None, "gpu": "GPU-1", "took_s": 2.5, "odd": float("nan"), "words": "a\x1b[2Jb"}
    record = Record("exited", "qwen ended: \x1b[31mred\nsecond", Severity.ERROR, "qwen", 3, "exited", numbers)
    got = json.loads(body(Notice("5f-12", 1_700_000_000.25, record, repeated=2), "gpu-01"))
    assert got == {
        "version": 1,
        "id": "5f-12",
        "at": "2023-11-14T22:13:20.250Z",
        "node": "gpu-01",
        "severity": "error",
        "kind": "exited",
        "engine": "qwen",
        "generation": 3,
        "reason": "exited",
        "message": "qwen ended:  [31mred\nsecond",
        "numbers": {"code": 1, "signal": None, "gpu": "GPU-1", "took_s": 2.5, "odd": None, "words": "a [2Jb"},
        "repeated": 2,
        "text": "gpu-01: error: qwen ended:  [31mred\nsecond (2 more like this before)",
    }


def test_a_message_is_small_and_ascii_whatever_an_engine_says() -> None:
    record = Record("exited", "\ud800ü" * 1_000_000, numbers={"detail": "y" * 100_000})
    raw = body(Notice("1", 0.0, record), "n")
    assert len(raw) < 100_000
    got = json.loads(raw.decode("ascii"))
    assert len(got["message"]) == MESSAGE_CHARS + len("...")
    assert "\ud800" not in got["message"]
