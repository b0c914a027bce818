//! Tests of NCCL's host one-sided operations: puts, signals and waits on streams.

use std::time::Duration;

use devcomm::{
    Buffer, CommConfig, Communicator, Element, Error, Rank, Signal, StateError, Stream,
    WaitSignalDesc, Window,
};
use devcomm_testing::machines::{Gpus, give_time};
use devcomm_testing::works::require_works;

const COUNT: usize = 1000;
const ROUNDS: usize = 5;
const LIMIT: Duration = Duration::from_secs(10);

/// Runs `body` on every rank, if NCCL has one-sided operations, and then checks the communicator.
fn on_gpus(
    name: &str,
    wanted: usize,
    body: impl Fn(&Rank, &Communicator, &Stream) -> Result<(), Error> + Sync,
) {
    Gpus::new(wanted).with_host_rma().run(name, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        body(rank, comm, &stream)?;
        require_works(comm, &stream)
    });
}

/// An element type of the tests, with a test value for each number.
trait Pattern: Element + PartialEq + std::fmt::Debug {
    fn of(x: usize) -> Self;
}
impl Pattern for f32 {
    fn of(x: usize) -> Self {
        (x % 100_000) as f32
    }
}
impl Pattern for u8 {
    fn of(x: usize) -> Self {
        (x % 251) as u8
    }
}

/// Returns the elements that rank `from` puts in round `round`.
fn pattern<T: Pattern>(from: usize, round: usize) -> Vec<T> {
    (0..COUNT).map(|i| T::of(from * 1000 + round * 10_000 + i)).collect()
}

fn require<T: Pattern>(window: &Window<T>, at: usize, expected: &[T]) -> Result<(), Error> {
    let mut got = vec![T::of(0); expected.len()];
    window.slice(at..at + expected.len())?.copy_to_host(&mut got)?;
    let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
    assert!(wrong.is_none(), "{}: element {at} + {wrong:?}", T::NAME);
    Ok(())
}

/// Each rank puts to the next one, at another offset every round.
fn ring<T: Pattern>(rank: &Rank, comm: &Communicator, stream: &Stream) -> Result<(), Error> {
    let (me, n) = (rank.rank(), rank.n_ranks());
    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
    let (source, target) = (comm.window::<T>(COUNT + 7)?, comm.window::<T>(ROUNDS * COUNT + 1)?);
    for round in 0..ROUNDS {
        let data = pattern::<T>(me, round);
        let part = source.slice(7..)?;
        part.copy_from_host(&data)?;
        // Never 0, so that an offset counted in bytes instead of elements is detected.
        let at = round * COUNT + 1;
        comm.put_signal(&part, &target, at, Signal::to(next), stream)?;
        comm.wait_signal(&[WaitSignalDesc::from(previous)], stream)?;
        stream.synchronize_within(LIMIT)?;
        require(&target, at, &pattern::<T>(previous, round))?;
    }
    require(&target, 0, &[T::of(0)])?;
    // Later rounds have not overwritten the first.
    require(&target, 1, &pattern::<T>(previous, 0))?;
    rank.barrier()
}

#[test]
fn a_ring_of_f32_on_two_gpus() {
    on_gpus("a_ring_of_f32_on_two_gpus", 2, ring::<f32>);
}

#[test]
fn a_ring_of_u8_on_two_gpus() {
    on_gpus("a_ring_of_u8_on_two_gpus", 2, ring::<u8>);
}

#[test]
fn a_ring_of_f32_on_four_gpus() {
    on_gpus("a_ring_of_f32_on_four_gpus", 4, ring::<f32>);
}

/// Every rank puts to every peer, and waits for all of them in one call.
fn all_pairs(rank: &Rank, comm: &Communicator, stream: &Stream) -> Result<(), Error> {
    let (me, n) = (rank.rank(), rank.n_ranks());
    let (source, target) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(n * COUNT)?);
    let peers = || (0..n).filter(|&peer| peer != me);
    for round in 0..ROUNDS {
        source.copy_from_host(&pattern::<f32>(me, round))?;
        for peer in peers() {
            comm.put_signal(&source, &target, me * COUNT, Signal::to(peer), stream)?;
        }
        let signals: Vec<_> = peers().map(WaitSignalDesc::from).collect();
        comm.wait_signal(&signals, stream)?;
        stream.synchronize_within(LIMIT)?;
        for peer in peers() {
            require(&target, peer * COUNT, &pattern::<f32>(peer, round))?;
        }
        // The next round writes the same elements.
        rank.barrier()?;
    }
    Ok(())
}

#[test]
fn all_pairs_on_two_gpus() {
    on_gpus("all_pairs_on_two_gpus", 2, all_pairs);
}

#[test]
fn all_pairs_on_four_gpus() {
    on_gpus("all_pairs_on_four_gpus", 4, all_pairs);
}

/// Waits once for several puts from every peer, a different number from each.
fn signals_are_counted(rank: &Rank, comm: &Communicator, stream: &Stream) -> Result<(), Error> {
    let (me, n) = (rank.rank(), rank.n_ranks());
    let (source, target) = (comm.window::<u8>(n * COUNT)?, comm.window::<u8>(n * n * COUNT)?);
    for round in 0..=me {
        source.slice(round * COUNT..)?.copy_from_host(&pattern::<u8>(me, round))?;
    }
    let peers = || (0..n).filter(|&peer| peer != me);
    for peer in peers() {
        for round in 0..=me {
            let part = source.slice(round * COUNT..(round + 1) * COUNT)?;
            let at = (me * n + round) * COUNT;
            comm.put_signal(&part, &target, at, Signal::to(peer), stream)?;
        }
    }
    let signals = peers().map(|peer| WaitSignalDesc::from(peer).count(peer as u32 + 1));
    comm.wait_signal(&signals.collect::<Vec<_>>(), stream)?;
    stream.synchronize_within(LIMIT)?;
    for peer in peers() {
        for round in 0..=peer {
            require(&target, (peer * n + round) * COUNT, &pattern::<u8>(peer, round))?;
        }
    }
    rank.barrier()
}

#[test]
fn signals_are_counted_on_two_gpus() {
    on_gpus("signals_are_counted_on_two_gpus", 2, signals_are_counted);
}

#[test]
fn signals_are_counted_on_four_gpus() {
    on_gpus("signals_are_counted_on_four_gpus", 4, signals_are_counted);
}

#[test]
fn a_stream_waits_until_it_is_signalled() {
    on_gpus("a_stream_waits_until_it_is_signalled", 2, |rank, comm, stream| {
        // NCCL sets up one-sided operations at the first window, and connections between ranks at
        // the first use.
        ring::<u8>(rank, comm, stream)?;
        for _ in 0..ROUNDS {
            if rank.is_root() {
                comm.wait_signal(&[WaitSignalDesc::from(1)], stream)?;
                give_time(rank, Duration::from_millis(20));
                assert!(!stream.is_idle()?);
                rank.barrier()?;
            } else {
                rank.barrier()?;
                comm.signal(Signal::to(0), stream)?;
            }
            stream.synchronize_within(LIMIT)?;
        }
        Ok(())
    });
}

/// Signals of a pair of ranks are counted separately per index.
#[test]
fn signals_are_told_apart_by_their_index() {
    on_gpus("signals_are_told_apart_by_their_index", 2, |rank, _, stream| {
        let comm = rank.new_communicator(&CommConfig::new().num_rma_sig(2))?;
        ring::<u8>(rank, &comm, stream)?;
        let peer = 1 - rank.rank();
        let second = Signal { index: 1, ..Signal::to(peer) };
        let wait = WaitSignalDesc { index: 1, ..WaitSignalDesc::from(peer) };
        if rank.is_root() {
            comm.wait_signal(&[wait], stream)?;
            // Rank 1 has raised signal 0, but this waits for signal 1.
            rank.barrier()?;
            give_time(rank, Duration::from_millis(20));
            assert!(!stream.is_idle()?);
            rank.barrier()?;
        } else {
            comm.signal(Signal::to(peer), stream)?;
            stream.synchronize_within(LIMIT)?;
            rank.barrier()?;
            rank.barrier()?;
            comm.signal(second, stream)?;
        }
        stream.synchronize_within(LIMIT)?;
        if rank.is_root() {
            comm.wait_signal(&[WaitSignalDesc::from(peer)], stream)?;
            stream.synchronize_within(LIMIT)?;
        }
        rank.barrier()
    });
}

#[test]
fn a_put_beyond_the_end_of_a_shorter_window_of_the_peer_is_refused() {
    let name = "a_put_beyond_the_end_of_a_shorter_window_of_the_peer_is_refused";
    on_gpus(name, 2, |rank, comm, stream| {
        let (me, peer) = (rank.rank(), 1 - rank.rank());
        let source = comm.window::<u8>(COUNT)?;
        let target = comm.window::<u8>(if rank.is_root() { COUNT } else { COUNT / 2 })?;
        // Both ranks put as much as the shorter window has, the root also as much as its own has.
        let half = source.slice(..COUNT / 2)?;
        half.copy_from_host(&pattern::<u8>(me, 0)[..COUNT / 2])?;
        if rank.is_root() {
            let refused = comm.put_signal(&source, &target, 0, Signal::to(peer), stream);
            let Err(Error::InvalidInput { what }) = refused else { panic!("{refused:?}") };
            assert!(what.contains(&format!("a window of {} elements on rank 1", COUNT / 2)));
        }
        comm.put_signal(&half, &target, 0, Signal::to(peer), stream)?;
        comm.wait_signal(&[WaitSignalDesc::from(peer)], stream)?;
        stream.synchronize_within(LIMIT)?;
        require(&target, 0, &pattern::<u8>(peer, 0)[..COUNT / 2])?;
        rank.barrier()
    });
}

#[test]
fn what_cannot_be_put_or_waited_for_is_refused() {
    on_gpus("what_cannot_be_put_or_waited_for_is_refused", 2, |rank, comm, stream| {
        let (source, target) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
        let other = rank.new_communicator(&CommConfig::new())?;
        let foreign = other.window::<f32>(COUNT)?;
        let peer = 1 - rank.rank();
        let invalid = |refused: Result<(), Error>| {
            assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        };
        invalid(comm.put_signal(&source, &target, 1, Signal::to(peer), stream));
        invalid(comm.put_signal(&source, &target, usize::MAX, Signal::to(peer), stream));
        invalid(comm.put_signal(&source, &target, 0, Signal::to(2), stream));
        invalid(comm.put_signal(&source, &foreign, 0, Signal::to(peer), stream));
        invalid(comm.signal(Signal::to(2), stream));
        let large_index = Signal { index: u32::MAX, ..Signal::to(peer) };
        invalid(comm.signal(large_index, stream));
        invalid(comm.wait_signal(&[], stream));
        invalid(comm.wait_signal(&[WaitSignalDesc::from(2)], stream));
        target.close()?;
        let closed = comm.put_signal(&source, &target, 0, Signal::to(peer), stream);
        assert!(matches!(closed, Err(Error::State(StateError::Closed { .. }))), "{closed:?}");
        Ok(())
    });
}
