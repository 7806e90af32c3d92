"""Streams of KV cache events: what is lost is asked for again, and what cannot be had is not pretended to be known."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvrelay.router.core.kv.stream import REPLAY_TIMEOUT_S, SILENCE_S, Action, Apply, Ask, Forget, Stream


def batch(number: int, life: int = 0) -> bytes:
    return b"batch %d of life %d" % (number, life)


def taken(actions: list[Action]) -> list[bytes]:
    return [action.payload for action in actions if isinstance(action, Apply)]


def begun(upto: int) -> Stream:
    """A stream that has taken batches 0 to ``upto``."""
    stream = Stream(replays=True)
    assert stream.start(0.0) == [Ask(0)]
    assert stream.replay_ended(0.0) == []
    for number in range(upto + 1):
        assert stream.live(number, batch(number), 0.0) == [Apply(batch(number))]
    return stream


def test_everything_that_is_kept_is_asked_for_at_first() -> None:
    stream = Stream(replays=True)
    assert stream.start(0.0) == [Ask(0)]
    assert stream.live(2, batch(2), 0.0) == []
    for number in range(2):
        assert stream.replayed(number, batch(number), 0.0) == [Apply(batch(number))]
    assert stream.replay_ended(0.0) == [Apply(batch(2))]
    assert stream.gaps == 0


def test_batches_of_a_replay_that_come_once_more_are_skipped() -> None:
    stream = Stream(replays=True)
    stream.start(0.0)
    for number in range(3):
        stream.live(number, batch(number), 0.0)
        stream.replayed(number, batch(number), 0.0)
    assert stream.replay_ended(0.0) == []
    assert stream.live(3, batch(3), 0.0) == [Apply(batch(3))]


def test_a_gap_is_filled_by_a_replay() -> None:
    stream = begun(1)
    assert stream.live(4, batch(4), 0.0) == [Ask(1)]
    assert stream.live(5, batch(5), 0.0) == []
    assert stream.replayed(1, batch(1), 0.0) == []
    assert [stream.replayed(number, batch(number), 0.0) for number in (2, 3)] == [[Apply(batch(2))], [Apply(batch(3))]]
    assert stream.replay_ended(0.0) == [Apply(batch(4)), Apply(batch(5))]
    assert (stream.gaps, stream.replays) == (1, 2)


def test_a_gap_that_a_replay_does_not_fill_makes_all_forgotten() -> None:
    stream = begun(1)
    assert stream.live(9, batch(9), 0.0) == [Ask(1)]
    assert stream.replayed(7, batch(7), 0.0) == [Forget("gap"), Apply(batch(7))]
    assert stream.replayed(8, batch(8), 0.0) == [Apply(batch(8))]
    assert stream.replay_ended(0.0) == [Apply(batch(9))]


def test_a_restart_is_seen_by_a_number_that_was_there() -> None:
    stream = begun(3)
    assert stream.live(0, batch(0, 1), 0.0) == [Forget("restart"), Ask(0)]
    assert stream.replayed(0, batch(0, 1), 0.0) == [Apply(batch(0, 1))]
    assert stream.replay_ended(0.0) == []
    assert stream.restarts == 1


def test_a_restart_behind_a_gap_is_seen_by_another_batch_of_the_same_number() -> None:
    stream = begun(1)
    assert stream.live(3, batch(3, 1), 0.0) == [Ask(1)]
    assert stream.replayed(1, batch(1, 1), 0.0) == [Forget("restart"), Ask(0)]
    for number in range(4):
        assert stream.replayed(number, batch(number, 1), 0.0) == [Apply(batch(number, 1))]
    assert stream.replay_ended(0.0) == []


def test_a_restart_that_continues_the_numbers_is_seen_after_the_connection_was_lost() -> None:
    stream = begun(1)
    assert stream.disconnected(0.0) == [Ask(1)]
    assert stream.live(2, batch(2, 1), 0.0) == []
    assert stream.replayed(1, batch(1, 1), 0.0) == [Forget("restart"), Ask(0)]


def test_an_engine_that_restarted_and_did_nothing_yet_holds_nothing() -> None:
    stream = begun(1)
    stream.disconnected(0.0)
    assert stream.replay_ended(0.0) == [Forget("restart"), Ask(0)]
    assert stream.replay_ended(0.0) == []


def test_in_a_long_silence_the_engine_is_asked() -> None:
    stream = begun(1)
    assert stream.tick(SILENCE_S - 1) == []
    assert stream.tick(SILENCE_S) == [Ask(1)]
    assert stream.replayed(1, batch(1), SILENCE_S) == []
    assert stream.replayed(2, batch(2), SILENCE_S) == [Apply(batch(2))]
    assert stream.replay_ended(SILENCE_S) == []


def test_an_engine_that_does_not_answer_is_asked_again_and_believed_if_it_only_publishes() -> None:
    stream = begun(1)
    stream.disconnected(0.0)
    assert stream.tick(REPLAY_TIMEOUT_S) == [Ask(1)]
    assert stream.live(5, batch(5), REPLAY_TIMEOUT_S) == []
    assert stream.tick(2 * REPLAY_TIMEOUT_S) == [Forget("unanswered"), Apply(batch(5))]


def test_without_replay_gaps_and_lost_connections_make_all_forgotten() -> None:
    stream = Stream(replays=False)
    assert stream.start(0.0) == []
    assert stream.due is None
    assert stream.live(7, batch(7), 0.0) == [Apply(batch(7))]
    assert stream.live(9, batch(9), 0.0) == [Forget("gap"), Apply(batch(9))]
    assert stream.disconnected(0.0) == [Forget("connection")]
    assert stream.live(3, batch(3), 0.0) == [Apply(batch(3))]


class Publisher(RuleBasedStateMachine):
    """An engine that publishes, loses what it publishes, restarts and forgets; and what a listener makes of it."""

    KEPT = 4

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.stream = Stream(replays=True)
        self.life = 0
        self.published: list[bytes] = []
        self.known: list[bytes] = []
        self.asked: int | None = None
        self.lost = 0
        self.do(self.stream.start(self.now))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(first):
                    self.asked = first
                case Apply(payload):
                    self.known.append(payload)
                case Forget():
                    self.known.clear()

    @rule(arrives=st.booleans())
    def publishes(self, arrives: bool) -> None:
        number = len(self.published)
        self.published.append(batch(number, self.life))
        if arrives:
            self.do(self.stream.live(number, self.published[-1], self.now))
        else:
            self.lost += 1

    @rule()
    def answers(self) -> None:
        if self.asked is None:
            return
        first, self.asked = self.asked, None
        for number in range(max(first, len(self.published) - self.KEPT), len(self.published)):
            actions = self.stream.replayed(number, self.published[number], self.now)
            self.do(actions)
            if any(isinstance(action, Ask) for action in actions):
                return  # what would come is of no use any more
        self.do(self.stream.replay_ended(self.now))

    @rule()
    def restarts(self) -> None:
        self.life += 1
        self.published.clear()
        self.do(self.stream.disconnected(self.now))

    @rule(seconds=st.sampled_from([1.0, 15.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.stream.tick(self.now))

    def teardown(self) -> None:
        for _ in range(4):  # a timeout, a verification, a restart, its replay
            self.time_passes(100.0)
            while self.asked is not None:
                self.answers()
        end = len(self.published) - len(self.known)
        assert self.known == self.published[end:], "not what this life of the engine published last"
        if not self.lost:
            assert len(self.known) >= min(len(self.published), self.KEPT)


TestPublisher = Publisher.TestCase
TestPublisher.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
