//! All-reduce within the LSA team in one step: every rank sends its input to all ranks, in messages
//! without separate flags (`Lamport`), and reduces what it receives. This is for short messages,
//! and for two ranks, between which an all-reduce in two steps would move no fewer bytes.

use super::prelude::*;

/// Reduces `input` over the ranks: `output[i]` becomes the reduction of `input[i]`, for `i <
/// count`, in every rank of the LSA team of `N` ranks.
///
/// f16 and bf16 are reduced in f32 and rounded once. All ranks get the same bits. `output` may be
/// `input`. -0 may count as +0.
///
/// `memory` has a slot for each vector of a message.
///
/// Grid: enough threads for the message's vectors, at [`ROWS`] for each thread. Block: any,
/// one-dimensional. Dependent launch: allowed. `count` is in elements, the same in every rank.
///
/// # Safety
///
/// `input` and `output` have `count` elements, and nothing else accesses them until the kernel has
/// ended. `memory` is as [`LamportSlots`] needs it.
#[kernel(T = [f32, f16, bf16], N = [4, 8], max_threads = 1024)]
pub unsafe fn lamport_allreduce<T: Accumulate<Acc = f32>, const N: usize>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    output: *mut T,
    count: usize,
    reduction: Reduction,
) {
    let part = Part::new(input, output, count, reduction);
    assert!(part.vectors <= ROWS as u32 * threads(), "more vectors than threads have");
    let mut at = thread::index_1d();
    // SAFETY: one thread uses each slot; the kernel's caller guarantees the elements.
    unsafe {
        let session = part.begin::<N, ROWS>(&comm, &memory);
        while at < part.vectors {
            part.receive(&session, at, part.input.load(at as usize));
            at += threads();
        }
    }
}

/// Reduces as [`lamport_allreduce()`] does, for two ranks, and any number of vectors. A
/// multiprocessor has room for the next launch's blocks in addition to those of this one.
///
/// Grid: any. Block: one-dimensional, whole warps, at most 512 threads.
///
/// # Safety
///
/// The same as for [`lamport_allreduce()`].
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 512,
    min_blocks = 4,
    requires(block.x.is_multiple_of(32)),
)]
pub unsafe fn lamport_allreduce_two<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    output: *mut T,
    count: usize,
    reduction: Reduction,
) {
    let part = Part::new(input, output, count, reduction);
    // A thread sends while it waits for earlier vectors.
    let mut at = thread::index_1d();
    let mut next = at + threads();
    // SAFETY: one thread uses each slot; the kernel's caller guarantees the elements.
    unsafe {
        let session = part.begin::<2, 1>(&comm, &memory);
        while next < at + AHEAD * threads() {
            part.send(&session, next, part.load::<1>(next));
            next += threads();
        }
        // The warp goes on as long as one of its lanes has a vector.
        while at - at % warp::WARP_SIZE < part.vectors {
            if at < part.vectors {
                // This vector is loaded again: until now it would have taken registers.
                let mine = part.input.load(at as usize);
                part.send(&session, next, part.load::<1>(next));
                part.receive(&session, at, mine);
            }
            // Lanes whose messages came one by one go on together: stores of only some lanes
            // would be more packets to the peer, and shorter ones.
            warp::sync();
            at += threads();
            next += threads();
        }
    }
}

/// The most vectors of a thread of [`lamport_allreduce()`]; more would take too many registers.
pub const ROWS: usize = 2;

/// The number of vectors by which a thread of [`lamport_allreduce_two()`] sends ahead.
const AHEAD: u32 = 2;

struct Part<T> {
    vectors: u32,
    input: Elements<T>,
    output: Elements<T>,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<T> {
    fn new(input: *const T, output: *mut T, count: usize, reduction: Reduction) -> Self {
        let (input, output) =
            (Elements::new(input.cast_mut(), count), Elements::new(output, count));
        Self { vectors: input.vectors() as u32, input, output, reduction }
    }

    /// Begins a launch, sends a thread's first vectors and ends the session, which may end before
    /// messages are received. Each slot is used by one thread.
    unsafe fn begin<'a, const N: usize, const ROWS: usize>(
        &self,
        comm: &'a DevComm,
        memory: &LamportMemory,
    ) -> Lamport<'a, N> {
        let first = thread::index_1d();
        // SAFETY: one thread uses each slot; the kernel's caller guarantees the elements.
        unsafe {
            // This is before the wait, so that the address is computed there. It gains little for
            // longer messages, which wait for more than their first load.
            if self.vectors <= threads() {
                self.input.prefetch(first as usize);
            }
            let ranks = comm.lsa_team().n_ranks as usize;
            assert!(ranks == N, "the LSA team has as many ranks as the kernel");
            let slots = LamportSlots::<N>::new(comm, memory);
            wait_for_previous(memory, is_long(self.vectors, threads()));
            // The bank's number and the first vectors are in flight together.
            let mine = self.load::<ROWS>(first);
            let session = slots.begin(self.vectors);
            self.send(&session, first, mine);
            // Only now: the messages do not wait for this instruction.
            grid::launch_next();
            thread::sync_threads(); // All threads have the number of the launch.
            session.end(Coop::cta());
            session
        }
    }

    /// Loads this rank's vectors of a thread, from `first` on.
    unsafe fn load<const ROWS: usize>(&self, first: u32) -> [Vec16<T>; ROWS] {
        let mut mine = [Vec16::from_bits([0; 4]); ROWS];
        for u in 0..ROWS {
            let at = first + u as u32 * threads();
            if at < self.vectors {
                // SAFETY: the input has the vector; the kernel's caller guarantees its elements.
                mine[u] = unsafe { self.input.load(at as usize) };
            }
        }
        mine
    }

    /// Sends vectors of a thread, from `first` on, to all peers.
    unsafe fn send<const N: usize, const ROWS: usize>(
        &self,
        session: &Lamport<'_, N>,
        first: u32,
        mine: [Vec16<T>; ROWS],
    ) {
        for u in 0..ROWS {
            let at = first + u as u32 * threads();
            if at < self.vectors {
                let vector = self.reduction.scale(mine[u]);
                for distance in 1..N {
                    // SAFETY: `begin` has begun the session, and only this thread uses the slot.
                    unsafe { session.send(distance, at, vector) };
                }
            }
        }
    }

    /// Receives a vector of all ranks, and stores the result.
    unsafe fn receive<const N: usize>(&self, session: &Lamport<'_, N>, at: u32, mine: Vec16<T>) {
        // SAFETY: one thread uses each slot; the kernel's caller guarantees the elements.
        unsafe {
            let all = session.receive_all(at, self.reduction.scale(mine));
            // The peers have the vector as `message` returns it, and all ranks must reduce the same
            // bits. It is called here, since this vector may come from memory during the wait.
            let all = all.map(message);
            self.output.store(at as usize, self.reduction.reduce(all));
        }
    }
}
