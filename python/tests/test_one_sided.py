"""Puts and signals of the host, on simulated GPUs."""

import numpy as np
import pytest

import devcomm

N = 3


def on_ranks(function):
    return devcomm.World.simulated(N).run(function)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64"])
def test_a_rank_puts_into_the_windows_of_its_peers(dtype):
    count = 8

    def run(rank):
        comm, me = rank.communicator(), rank.rank
        source, target = comm.window(2 * count, dtype), comm.window(N * count, dtype)
        peers = [peer for peer in range(N) if peer != me]
        received = []
        for step in range(2):
            source.copy_from(np.arange(2 * count).astype(dtype) + 10 * me + step)
            for peer in peers:
                target.put_signal(source, peer, me * count, first=3, count=count)
            for peer in peers:
                comm.wait_signal(peer)
            every = np.zeros(N * count, dtype)
            target.copy_to(every)
            received.append(every.reshape(N, count))
            # The signals say that the parts of the window were read, and may be written again.
            for peer in peers:
                comm.signal(peer)
            for peer in peers:
                comm.wait_signal(peer)
        return received

    for me, received in enumerate(on_ranks(run)):
        for step, every in enumerate(received):
            for peer in set(range(N)) - {me}:
                assert np.array_equal(every[peer], np.arange(3, 11) + 10 * peer + step)


def test_one_wait_is_for_several_signals():
    def run(rank):
        comm = rank.communicator()
        window = comm.window(4, "f32")
        if rank.rank == 0:
            window.copy_from(np.full(4, 7, np.float32))
            for at in range(3):
                window.put_signal(window, 1, at, count=1)
        if rank.rank == 1:
            comm.wait_signal(0, 3)
        out = np.zeros(4, np.float32)
        window.copy_to(out)
        return out.tolist()

    assert on_ranks(run) == [[7.0] * 4, [7.0, 7.0, 7.0, 0.0], [0.0] * 4]


def test_a_put_that_does_not_fit_is_refused():
    def run(rank):
        comm = rank.communicator()
        window, bytes_ = comm.window(4, "f32"), comm.window(4, "u8")
        refused = [
            ("on the host", lambda: window.put_signal(np.zeros(4, np.float32), 1)),
            ("Uint8", lambda: window.put_signal(bytes_, 1)),
            ("element 2", lambda: window.put_signal(window, 1, 2)),
            ("memory of 4", lambda: window.put_signal(window, 1, count=5)),
            ("rank", lambda: window.put_signal(window, 7)),
            ("rank", lambda: comm.signal(7)),
            ("rank", lambda: comm.wait_signal(7)),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()

    on_ranks(run)
