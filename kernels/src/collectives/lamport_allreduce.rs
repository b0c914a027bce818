//! All-reduce of short messages within the LSA team in one step: every rank sends its input to all
//! ranks, in messages that are their own flags, and reduces what it receives.

use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window};

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
/// Grid: any. Block: at most 512 threads, one-dimensional. May be a dependent launch. `count` is in
/// elements, the same in every rank.
///
/// # Safety
///
/// `input` and `output` have `count` elements, and nothing else accesses them until the kernel has
/// ended. `slots` and `state` are as [`LamportSlots`] needs them.
#[kernel(T = [f32, f16, bf16], max_threads = 512)]
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
    let part = Part { input, output, reduction };
    // SAFETY: the kernel's contract.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => part.reduce(LamportSlots::<2>::new(&comm, slots, capacity), state),
            4 => part.reduce(LamportSlots::<4>::new(&comm, slots, capacity), state),
            8 => part.reduce(LamportSlots::<8>::new(&comm, slots, capacity), state),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// Vectors of a thread that are in flight.
const UNROLL: usize = 2;

struct Part<T> {
    input: Elements<T>,
    output: Elements<T>,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<T> {
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn reduce<const N: usize>(&self, slots: LamportSlots<'_, N>, state: *mut u32) {
        let vectors = self.input.vectors() as u32;
        let threads = thread::grid_dim_x() * thread::block_dim_x();
        let mut first = thread::index_1d();
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract. Each slot is used by one thread.
        unsafe {
            // All loads before the first send are in flight together.
            let loaded = self.load(first, threads);
            let session = slots.begin(state, vectors);
            let mut mine = loaded.map(|vector| self.reduction.scale(vector));
            self.send(&session, first, threads, &mine);
            // While the messages are on their way.
            let mut slot = first;
            while slot < session.to_clear() {
                session.clear(slot);
                slot += threads;
            }
            loop {
                self.receive(&session, first, threads, &mine);
                first += UNROLL as u32 * threads;
                if first >= vectors {
                    break;
                }
                mine = self.load(first, threads).map(|vector| self.reduction.scale(vector));
                self.send(&session, first, threads, &mine);
            }
            thread::sync_threads();
            session.end(Coop::cta());
        }
    }

    /// This rank's part of the vectors of a thread from `first` on.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn load(&self, first: u32, threads: u32) -> [Vec16<T>; UNROLL] {
        let mut mine = [Vec16::from_bits([0; 4]); UNROLL];
        let mut u = 0;
        while u < UNROLL {
            let at = (first + u as u32 * threads) as usize;
            if at < self.input.vectors() {
                // SAFETY: the caller's contract.
                mine[u] = unsafe { self.input.load(at) };
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
    unsafe fn send<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        first: u32,
        threads: u32,
        mine: &[Vec16<T>; UNROLL],
    ) {
        let mut u = 0;
        while u < UNROLL {
            let at = first + u as u32 * threads;
            if (at as usize) < self.input.vectors() {
                let mut distance = 1;
                while distance < N {
                    // SAFETY: the caller's contract; only this thread uses the slot.
                    unsafe { session.send(distance, at, mine[u]) };
                    distance += 1;
                }
            }
            u += 1;
        }
    }

    /// Receives those of all ranks, and stores the results.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn receive<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        first: u32,
        threads: u32,
        mine: &[Vec16<T>; UNROLL],
    ) {
        let mut u = 0;
        while u < UNROLL {
            let at = first + u as u32 * threads;
            if (at as usize) < self.input.vectors() {
                // SAFETY: the caller's contract.
                unsafe {
                    let all = session.receive_all(at, mine[u]);
                    self.output.store(at as usize, self.reduction.reduce(all));
                }
            }
            u += 1;
        }
    }
}
