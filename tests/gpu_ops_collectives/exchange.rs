//! Tests of all-gather, broadcast, all-to-all and reduce-scatter.

use devcomm::{
    Algorithm, Buffer, Collective, Collectives, CollectivesOptions, Communicator, DeviceSlice,
    Element, Graph, Parts, Rank, ReduceOp, Result, Simulation, Stream,
};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

use super::{Number, sent};

/// An element of any bits.
trait Bits: Element + PartialEq + std::fmt::Debug {
    /// The element with all bits set.
    const ONES: Self;

    /// Returns element `i` of the data that rank `from` sends to rank `to` in a launch. Every other
    /// one has the bits of an empty slot.
    fn of(from: usize, to: usize, launch: usize, i: usize) -> Self;
}

impl Bits for u32 {
    const ONES: Self = Self::MAX;

    fn of(from: usize, to: usize, launch: usize, i: usize) -> Self {
        let key = (from << 20 | to << 16 | launch << 8) as u32 ^ i as u32;
        if key.is_multiple_of(2) { 0x8000_0000 } else { key.wrapping_mul(0x9e37_79b1) }
    }
}

impl Bits for u8 {
    const ONES: Self = Self::MAX;

    fn of(from: usize, to: usize, launch: usize, i: usize) -> Self {
        u32::of(from, to, launch, i / 4).to_le_bytes()[i % 4]
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    AllGather,
    Broadcast(usize),
    AllToAll,
}
use Operation::{AllGather, AllToAll, Broadcast};

/// Where the memory of an operation is.
#[derive(Clone, Copy, PartialEq)]
enum Memory {
    /// Buffers in no window, which begin this number of elements after an aligned address.
    Plain(usize),
    /// Buffers in windows; the data to send is in its place in the memory that receives.
    InPlace,
    /// Buffers in windows.
    Window,
    /// An unaligned buffer to send, and one in a window to receive.
    Odd,
}

/// An operation with its memory, whose last element stays as it is.
struct Exchange<T> {
    operation: Operation,
    /// Elements of a message.
    count: usize,
    send: DeviceSlice<T>,
    memory: DeviceSlice<T>,
}

impl<T: Bits> Exchange<T> {
    fn new(
        comm: &Communicator,
        operation: Operation,
        count: usize,
        memory: Memory,
    ) -> Result<Self> {
        let (ranks, rank) = (comm.n_ranks(), comm.rank());
        let allocate = |len: usize| match memory {
            Memory::Plain(skip) => comm.mem_alloc::<T>(skip + len)?.slice(skip..),
            _ => Ok(comm.window::<T>(len)?.device_slice()),
        };
        let (sent, received) = match operation {
            AllGather => (count, ranks * count),
            Broadcast(_) => (count, count),
            AllToAll => (ranks * count, ranks * count),
        };
        let receiving = allocate(received + 1)?;
        let send = match (operation, memory) {
            (AllGather, Memory::InPlace) => receiving.slice(rank * count..(rank + 1) * count)?,
            (Broadcast(_), Memory::InPlace) => receiving.slice(..count)?,
            (_, Memory::Odd) => comm.mem_alloc::<T>(1 + sent)?.slice(1..)?,
            _ => allocate(sent)?,
        };
        Ok(Self { operation, count, send, memory: receiving })
    }

    fn fill(&self, rank: usize, launch: usize) -> Result<()> {
        self.memory.fill_bytes(0xff)?;
        // A broadcast's receivers send nothing.
        if !matches!(self.operation, Broadcast(root) if root != rank) {
            let sent = |i| match self.operation {
                AllToAll => T::of(rank, i / self.count, launch, i % self.count),
                _ => T::of(rank, 0, launch, i),
            };
            self.send.copy_from_host(&(0..self.send.len()).map(sent).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    fn run(&self, collectives: &Collectives, rank: usize, stream: &Stream) -> Result<Algorithm> {
        let Self { operation, send, memory, .. } = self;
        let recv = memory.slice(..memory.len() - 1)?;
        let call = match *operation {
            AllGather => {
                collectives.all_gather(send, &recv, stream)?;
                Collective::all_gather(send, &recv)
            }
            Broadcast(root) => {
                // What the other ranks pass is not used.
                let send = if rank == root { send.clone() } else { send.slice(..1)? };
                collectives.broadcast(Some(send.clone()), &recv, root, stream)?;
                Collective::broadcast(Some(send), &recv, root)
            }
            AllToAll => {
                collectives.all_to_all(send, &recv, stream)?;
                Collective::all_to_all(send, &recv)
            }
        };
        Ok(collectives.explain(&call)?.plan.algorithm)
    }

    fn check(&self, rank: usize, launch: usize) -> Result<()> {
        let Self { operation, count, memory, .. } = self;
        let mut got = vec![T::ONES; memory.len()];
        memory.copy_to_host(&mut got)?;
        for (i, got) in got[..memory.len() - 1].iter().enumerate() {
            let want = match *operation {
                AllGather => T::of(i / count, 0, launch, i % count),
                Broadcast(root) => T::of(root, 0, launch, i),
                AllToAll => T::of(i / count, rank, launch, i % count),
            };
            assert_eq!(*got, want, "{launch}: {operation:?} of {count}, element {i}");
        }
        assert_eq!(got.last(), Some(&T::ONES), "{launch}: {operation:?} wrote past the end");
        Ok(())
    }
}

/// Runs the operations one after the other without a wait, and then replays them from a graph with
/// other data.
fn all_follow_each_other<T: Bits>(
    rank: &Rank,
    options: CollectivesOptions,
    by: Algorithm,
    all: &[(Operation, usize, Memory)],
) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (collectives, rank_number) = (options.build(comm)?, rank.rank());
    let exchanges: Result<Vec<_>> = all
        .iter()
        .map(|&(operation, count, memory)| Exchange::<T>::new(comm, operation, count, memory))
        .collect();
    let exchanges = exchanges?;
    let run = || -> Result<()> {
        exchanges.iter().zip(all).try_for_each(|(exchange, (.., memory))| {
            // This rank's stream orders it before what peers store there.
            if !matches!(memory, Memory::InPlace) {
                stream.fill(&exchange.memory, T::ONES)?;
            }
            let algorithm = exchange.run(&collectives, rank_number, &stream)?;
            assert_eq!(algorithm, by, "{:?} of {}", exchange.operation, exchange.count);
            Ok(())
        })
    };
    let mut graph: Option<Graph> = None;
    for launch in 0..3 {
        for exchange in &exchanges {
            exchange.fill(rank_number, launch)?;
        }
        // Peers write to the windows from now on.
        rank.barrier()?;
        match &graph {
            None => run()?,
            Some(graph) => graph.launch(&stream)?,
        }
        stream.synchronize()?;
        exchanges.iter().try_for_each(|exchange| exchange.check(rank_number, launch))?;
        if graph.is_none() {
            graph = Some(stream.capture(run)?);
        }
    }
    Ok(())
}

#[test]
fn short_exchanges_follow_each_other() {
    use Memory::{InPlace, Plain};
    for ranks in [2, 4, 8] {
        on_gpus("short_exchanges_follow_each_other", ranks, |rank| {
            // This is longer than the rows of a warp and of a block.
            let long = if rank.is_simulated() { 700 } else { 100_003 };
            let last = rank.n_ranks() - 1;
            let all = [
                (AllToAll, 1, Plain(0)),
                (AllGather, 3, InPlace),
                (Broadcast(0), long, Plain(0)),
                (Broadcast(last), 5, InPlace),
                (AllToAll, 33, Plain(1)),
                (AllGather, long, Plain(3)),
                (Broadcast(1), 124, Plain(4)),
                (AllGather, 124, Memory::Window),
            ];
            let options = only_short(rank);
            all_follow_each_other::<u32>(rank, options, Algorithm::Lamport, &all)?;
            let some = if rank.n_ranks() == 2 { 8 } else { 2 };
            all_follow_each_other::<u8>(rank, options, Algorithm::Lamport, &all[..some])
        });
    }
}

/// Returns options with which messages are short; simulated GPUs get less memory.
fn only_short(rank: &Rank) -> CollectivesOptions {
    match rank.is_simulated() {
        true => CollectivesOptions::new().lamport_bytes(16 << 10).push_blocks(1),
        false => CollectivesOptions::new(),
    }
}

/// Returns options with which all messages are long on simulated GPUs.
fn only_long(rank: &Rank) -> CollectivesOptions {
    match rank.is_simulated() {
        true => CollectivesOptions::new().lamport_bytes(64).push_blocks(2),
        false => CollectivesOptions::new(),
    }
}

#[test]
fn long_exchanges_follow_each_other() {
    use Memory::{InPlace, Odd, Window};
    for ranks in [2, 4] {
        on_gpus("long_exchanges_follow_each_other", ranks, |rank| {
            // These are more elements than the threads have in flight, and fewer.
            let [more, less] = match rank.is_simulated() {
                true => [16 * 9001, 16],
                false => [16 << 20, (4 << 20) + 16],
            };
            let mut all = vec![
                (AllGather, more, Window),
                (AllGather, less, InPlace),
                (AllToAll, less, Window),
                (AllToAll, more + 32, Window),
                (AllGather, less, Window),
            ];
            if rank.n_ranks() == 2 {
                all.extend([(Broadcast(0), more + 3, InPlace), (Broadcast(1), less + 1, Odd)]);
            }
            all_follow_each_other::<u8>(rank, only_long(rank), Algorithm::Push, &all)
        });
    }
}

#[test]
fn long_broadcasts_among_many_ranks_are_explained() {
    on_gpus("long_broadcasts_among_many_ranks_are_explained", 4, |rank| {
        let comm = rank.communicator()?;
        let collectives = CollectivesOptions::new().lamport_bytes(64).push_blocks(2).build(comm)?;
        let x = comm.window::<f32>(64)?;
        let call = Collective::broadcast(Some(x.device_slice()), &x, 0);
        let how = collectives.explain(&call)?.to_string();
        assert_eq!(how, "nccl, as the message is too long for one step");
        Ok(())
    });
}

#[test]
fn nccl_exchanges_what_load_and_store_do_not() {
    use Memory::{InPlace, Plain};
    on_gpus("nccl_exchanges_what_load_and_store_do_not", 2, |rank| {
        let count = if rank.is_simulated() { 35 } else { (5 << 20) + 3 };
        // The messages are neither short nor aligned, and not in a window.
        let all = [(AllGather, count, InPlace), (AllToAll, count, Plain(0))];
        all_follow_each_other::<u8>(rank, only_long(rank), Algorithm::Nccl, &all)
    });
}

/// Runs reduce-scatters of these counts, in and out of place, with an all-reduce and an all-gather
/// after each.
fn reduces<T: Number>(
    rank: &Rank,
    options: CollectivesOptions,
    by: Algorithm,
    op: ReduceOp,
    counts: &[usize],
) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (collectives, ranks) = (options.build(comm)?, rank.n_ranks());
    let one = comm.mem_alloc::<f32>(1)?;
    one.copy_from_host(&[1.0])?;
    let others = comm.mem_alloc::<f32>(ranks)?;
    let mut all = Vec::new();
    for (launch, &count) in counts.iter().enumerate() {
        let send = comm.window::<T>(ranks * count)?.device_slice();
        let element = |i| T::of(sent(rank.rank(), launch, i));
        send.copy_from_host(&(0..send.len()).map(element).collect::<Vec<_>>())?;
        let recv = match launch % 2 {
            0 => send.slice(rank.rank() * count..(rank.rank() + 1) * count)?,
            _ => comm.mem_alloc::<T>(count)?.device_slice(),
        };
        all.push((send, recv));
    }
    rank.barrier()?;
    for (send, recv) in &all {
        let how = collectives.explain(&Collective::reduce_scatter(send, recv, op))?;
        assert_eq!(how.plan.algorithm, by, "{}: {how}", recv.len());
        collectives.reduce_scatter(send, recv, op, &stream)?;
        collectives.all_reduce(&one, &one, ReduceOp::Max, &stream)?;
        collectives.all_gather(&one, &others, &stream)?;
    }
    stream.synchronize()?;
    let mut ones = vec![0.0; ranks];
    others.copy_to_host(&mut ones)?;
    assert_eq!(ones, vec![1.0; ranks]);
    for (launch, (_, recv)) in all.iter().enumerate() {
        let mut got = vec![T::of(0); recv.len()];
        recv.copy_to_host(&mut got)?;
        for (i, got) in got.iter().enumerate() {
            let at = rank.rank() * recv.len() + i;
            let want = super::reduced(op, (0..ranks).map(|rank| sent(rank, launch, at)));
            assert_eq!(got.value(), want, "{launch}: {op:?}, element {i} of {}", recv.len());
        }
    }
    Ok(())
}

#[test]
fn reduce_scatters_follow_each_other() {
    for ranks in [2, 4, 8] {
        on_gpus("reduce_scatters_follow_each_other", ranks, |rank| {
            let (short, long) = match rank.is_simulated() {
                true => ([1, 7, 64, 300, 8], [48, 9000, 800]),
                false => ([1, 7, 64, 100_003, 8192], [4 << 20, 16 << 20, 3 << 20]),
            };
            let options = only_short(rank);
            reduces::<f32>(rank, options, Algorithm::Lamport, ReduceOp::Sum, &short)?;
            reduces::<bf16>(rank, options, Algorithm::Lamport, ReduceOp::Min, &short[..2])?;
            if rank.n_ranks() == 8 {
                return Ok(());
            }
            reduces::<bf16>(rank, only_long(rank), Algorithm::Pull, ReduceOp::Avg, &long)
        });
    }
}

/// Returns the elements that rank `from` sends to rank `to` in all-to-all number `launch`: none, a
/// few, or more than fit in one step.
fn count_of(from: usize, to: usize, launch: usize, long: usize) -> usize {
    match (from * 3 + to * 5 + launch) % 7 {
        0 => 0,
        1 => long + from,
        2 => long + 16 * to,
        other => 37 * (other - 3) + to,
    }
}

/// An all-to-all with a count for each pair, with its memory, and the counts and offsets of the
/// parts to send and to receive.
struct Counted<T> {
    send: DeviceSlice<T>,
    recv: DeviceSlice<T>,
    sent: [Vec<usize>; 2],
    received: [Vec<usize>; 2],
}

impl<T: Bits> Counted<T> {
    /// Lays out the parts one after the other, with a gap of some elements between them.
    fn new(comm: &Communicator, launch: usize, long: usize, in_window: bool) -> Result<Self> {
        let (ranks, rank) = (comm.n_ranks(), comm.rank());
        let lay = |count: &dyn Fn(usize) -> usize| {
            let counts: Vec<_> = (0..ranks).map(count).collect();
            let mut end = launch % 2 * 3;
            let offsets = counts.iter().map(|count| {
                let offset = end;
                end += count.next_multiple_of(16) + launch % 3;
                offset
            });
            (vec![counts.clone(), offsets.collect()], end)
        };
        let (sent, to_send) = lay(&|to| count_of(rank, to, launch, long));
        let (received, to_receive) = lay(&|from| count_of(from, rank, launch, long));
        let memory = |len: usize| match in_window {
            true => Ok(comm.window::<T>(len)?.device_slice()),
            false => Ok::<_, devcomm::Error>(comm.mem_alloc::<T>(len)?.device_slice()),
        };
        let pair = |mut all: Vec<Vec<usize>>| [all.swap_remove(0), all.swap_remove(0)];
        Ok(Self {
            send: memory(to_send.max(1))?,
            recv: memory(to_receive.max(1))?,
            sent: pair(sent),
            received: pair(received),
        })
    }

    fn fill(&self, rank: usize, launch: usize) -> Result<()> {
        let mut data = vec![T::ONES; self.send.len()];
        for (to, (count, offset)) in self.sent[0].iter().zip(&self.sent[1]).enumerate() {
            for i in 0..*count {
                data[offset + i] = T::of(rank, to, launch, i);
            }
        }
        self.send.copy_from_host(&data)
    }

    fn run(&self, collectives: &Collectives, stream: &Stream) -> Result<()> {
        let parts = |[counts, offsets]: &'_ [Vec<usize>; 2]| (counts.clone(), offsets.clone());
        let (sent, received) = (parts(&self.sent), parts(&self.received));
        // This rank's stream orders it before what peers store there.
        stream.fill(&self.recv, T::ONES)?;
        collectives.all_to_all_v(
            &self.send,
            Parts { counts: &sent.0, offsets: &sent.1 },
            &self.recv,
            Parts { counts: &received.0, offsets: &received.1 },
            stream,
        )
    }

    fn check(&self, rank: usize, launch: usize) -> Result<()> {
        let mut got = vec![T::ONES; self.recv.len()];
        self.recv.copy_to_host(&mut got)?;
        let mut want = vec![T::ONES; got.len()];
        for (from, (count, offset)) in self.received[0].iter().zip(&self.received[1]).enumerate() {
            for i in 0..*count {
                want[offset + i] = T::of(from, rank, launch, i);
            }
        }
        assert!(got == want, "{launch}: {:?}", self.received);
        Ok(())
    }
}

#[test]
fn messages_of_any_length_follow_each_other() {
    fn follow<T: Bits>(rank: &Rank, in_window: bool) -> Result<()> {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (options, long) = match rank.is_simulated() {
            // More bytes than fit in one step.
            true => (CollectivesOptions::new().lamport_bytes(1 << 10).push_blocks(2), 1100),
            // The messages are just too long for two ranks to send them in one step.
            false => (CollectivesOptions::new(), (4 << 20) / size_of::<T>() + 5),
        };
        let (collectives, me) = (options.build(comm)?, rank.rank());
        let all: Result<Vec<_>> =
            (0..4).map(|i| Counted::<T>::new(comm, i, long, in_window)).collect();
        let all = all?;
        let run = || all.iter().try_for_each(|counted| counted.run(&collectives, &stream));
        let mut graph: Option<Graph> = None;
        for launch in 0..3 {
            all.iter().try_for_each(|counted| counted.fill(me, launch))?;
            // Peers write to the windows from now on.
            rank.barrier()?;
            match &graph {
                None => run()?,
                Some(graph) => graph.launch(&stream)?,
            }
            stream.synchronize()?;
            all.iter().try_for_each(|counted| counted.check(me, launch))?;
            if graph.is_none() {
                graph = Some(stream.capture(run)?);
            }
        }
        Ok(())
    }
    for ranks in [2, 4, 8] {
        on_gpus("messages_of_any_length_follow_each_other", ranks, |rank| {
            follow::<u8>(rank, true)?;
            if rank.n_ranks() < 8 { follow::<u32>(rank, false) } else { Ok(()) }
        });
    }
    // Blocks wait for room on one multiprocessor.
    let small = Gpus::from(Simulation::new(4).multiprocessors(1).seed(1).preempt(true));
    small.run("messages_of_any_length_follow_each_other", |rank| follow::<u8>(rank, true));
    // These ranks have no load and store between them.
    let apart = Gpus::from(Simulation::new(2).team_size(1));
    apart.run("messages_of_any_length_follow_each_other", |rank| follow::<u8>(rank, false));
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    on_gpus("parts_that_do_not_fit_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (collectives, x) = (Collectives::new(comm)?, comm.mem_alloc::<u64>(8)?);
        let refused = |counts: &[usize], offsets: &[usize]| {
            let parts = Parts { counts, offsets };
            let other = Parts { counts: &[1, 1], offsets: &[0, 1] };
            let refused = collectives.all_to_all_v(&x, parts, &x, other, &stream);
            refused.err().map(|error| error.to_string()).unwrap_or_default()
        };
        for (counts, offsets, reason) in [
            (&[1][..], &[0, 1][..], "1 counts and 2 offsets for 2 ranks"),
            (&[1, 4], &[0, 5], "8 elements, and not 4 from 5 on for rank 1"),
            (&[1, 2], &[0, usize::MAX], "for rank 1"),
            (&[2, 2], &[0, 2], "sends itself 2 elements and receives 1"),
        ] {
            let message = refused(counts, offsets);
            assert!(message.contains(reason), "{message}");
        }
        Ok(())
    });
}
