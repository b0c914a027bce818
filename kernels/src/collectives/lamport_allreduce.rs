//! All-reduce within the LSA team in one step: every rank sends its input to all ranks, in messages
//! that are their own flags, and reduces what it receives. For short messages, and for two ranks,
//! where two steps would move as many bytes.

use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window, message};

use super::elements::Elements;
use super::reduction::Reduction;

/// `output[i]` becomes the reduction over the ranks of `input[i]`, for `i < count`, in every rank
/// of the LSA team, which has 2, 4 or 8.
///
/// f16 and bf16 are reduced in f32 and rounded once. All ranks get the same bits. `output` may be
/// `input`. -0 counts as +0.
///
/// `slots` and `state` are the memory of [`Lamport`] messages, with `capacity` slots for vectors
/// from each rank.
///
/// Grid: any; with more than two ranks, [`ROWS`] vectors per thread are at least those of the
/// message. Block: any, one-dimensional. May be a dependent launch. `count` is in elements, the
/// same in every rank.
///
/// # Safety
///
/// `input` and `output` have `count` elements, and nothing else accesses them until the kernel has
/// ended. `slots` and `state` are as [`LamportSlots`] needs them.
#[kernel(T = [f32, f16, bf16], max_threads = 1024)]
pub unsafe fn lamport_allreduce<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    input: *const T,
    output: *mut T,
    count: usize,
    reduction: Reduction,
) {
    let (input, output) = (Elements::new(input.cast_mut(), count), Elements::new(output, count));
    let part = Part { vectors: input.vectors() as u32, input, output, reduction };
    // SAFETY: the kernel's contract.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => part.reduce::<2, 1>(LamportSlots::new(&comm, slots, capacity), state),
            4 => part.reduce::<4, ROWS>(LamportSlots::new(&comm, slots, capacity), state),
            8 => part.reduce::<8, ROWS>(LamportSlots::new(&comm, slots, capacity), state),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// The most vectors of a thread with more than two ranks: others would need more registers.
pub const ROWS: usize = 2;

struct Part<T> {
    vectors: u32,
    input: Elements<T>,
    output: Elements<T>,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<T> {
    /// `ROWS` vectors of a thread at a time. With two ranks there may be more than threads have:
    /// each thread receives some while the next ones are on their way. More of them in flight, 8
    /// MiB instead of 4, take 3 % longer.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn reduce<const N: usize, const ROWS: usize>(
        &self,
        slots: LamportSlots<'_, N>,
        state: *mut u32,
    ) {
        let vectors = self.vectors;
        let (first, group) = (thread::index_1d(), ROWS as u32 * threads());
        assert!(N == 2 || vectors <= group, "more vectors than threads have");
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract. Each slot is used by one thread.
        unsafe {
            // The bank's number and the first vectors are in flight together.
            let mine = self.load::<ROWS>(first);
            let session = slots.begin(state, vectors);
            self.send(&session, first, mine);
            thread::sync_threads();
            session.end(Coop::cta());
            let mut at = first;
            while N == 2 && at + group < vectors {
                let next = at + group;
                self.send(&session, next, self.load::<ROWS>(next));
                while at < next {
                    self.receive(&session, at);
                    at += threads();
                }
            }
            while at < vectors {
                self.receive(&session, at);
                at += threads();
            }
        }
    }

    /// Vectors of a thread from `first` on, of this rank.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn load<const ROWS: usize>(&self, first: u32) -> [Vec16<T>; ROWS] {
        let mut mine = [Vec16::from_bits([0; 4]); ROWS];
        let mut u = 0;
        while u < ROWS {
            let at = first + u as u32 * threads();
            if at < self.vectors {
                // SAFETY: the caller's contract.
                mine[u] = unsafe { self.input.load(at as usize) };
            }
            u += 1;
        }
        mine
    }

    /// Sends them to all peers.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn send<const N: usize, const ROWS: usize>(
        &self,
        session: &Lamport<'_, N>,
        first: u32,
        mine: [Vec16<T>; ROWS],
    ) {
        let mut u = 0;
        while u < ROWS {
            let at = first + u as u32 * threads();
            if at < self.vectors {
                let (mut distance, vector) = (1, self.reduction.scale(mine[u]));
                while distance < N {
                    // SAFETY: the caller's contract; only this thread uses the slot.
                    unsafe { session.send(distance, at, vector) };
                    distance += 1;
                }
            }
            u += 1;
        }
    }

    /// Receives a vector of all ranks, and stores the result.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn receive<const N: usize>(&self, session: &Lamport<'_, N>, at: u32) {
        // SAFETY: the caller's contract. The input is loaded again: it would take registers.
        unsafe {
            let mine = self.reduction.scale(self.input.load(at as usize));
            // As the peers have it: all ranks reduce the same.
            let all = session.receive_all(at, message(mine));
            self.output.store(at as usize, self.reduction.reduce(all));
        }
    }
}

/// Threads of the grid.
#[inline(always)]
fn threads() -> u32 {
    thread::grid_dim_x() * thread::block_dim_x()
}
