"""Channels between programs and services: any size, any pieces, bounded waits and memory."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kcache.service.channel import Channel
from kcache.util.wire import WireError, heading

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel, and the other side as a plain socket."""
    here, there = socket.socketpair()
    there.settimeout(60)
    channel = Channel(here, 60)
    yield channel, there
    channel.close()
    there.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 5 << 20])
def test_messages_of_every_size_go_both_ways(size: int) -> None:
    ends = [Channel(each, 60) for each in socket.socketpair()]
    question = [b"get", bytes(range(256)) * (size // 256) + b"x" * (size % 256), b""]
    with ThreadPoolExecutor(1) as pool:
        for asks, answers in (ends, reversed(ends)):
            coming = pool.submit(asks.ask, question, 60.0)
            assert answers.next() == question
            answers.send(question[::-1])
            assert coming.result(60) == question[::-1]
    for each in ends:
        each.close()


def test_an_answer_that_does_not_come_is_not_waited_for(pair: Pair) -> None:
    channel, there = pair
    with pytest.raises(TimeoutError):
        channel.ask([b"get"], 0.01)
    there.sendall(heading([b"x" * 9000]))
    with pytest.raises(TimeoutError):
        channel.ask([b"get"], 0.01)


def test_a_side_that_takes_nothing_is_not_waited_for(pair: Pair) -> None:
    channel, _ = pair
    with pytest.raises(TimeoutError):
        channel.ask([b"put", bytes(64 << 20)], 0.01)


def test_a_number_that_the_program_has_taken_is_neither_written_to_nor_closed(pair: Pair) -> None:
    channel, _ = pair
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    number = channel._socket.fileno()
    os.dup2(ours.fileno(), number)
    with pytest.raises(WireError, match="the program has closed"):
        channel.ask([b"get"], 60)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    channel.close()
    assert os.path.samestat(os.fstat(number), os.fstat(ours.fileno()))
    os.close(number)
    ours.close()
    theirs.close()


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="there is no SIGPIPE")
def test_a_service_that_has_ended_does_not_end_a_program_with_sigpipe(pair: Pair) -> None:
    channel, there = pair
    there.close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        with pytest.raises(BrokenPipeError):
            channel.ask([b"x" * (8 << 20)], 60)
        assert signal.SIGPIPE not in signal.sigpending()  # it would have ended this process
    finally:
        if signal.SIGPIPE in signal.sigpending():
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGPIPE, before)
