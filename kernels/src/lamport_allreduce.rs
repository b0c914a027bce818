//! All-reduce of short messages within the LSA team in one step: every rank sends its input to all
//! ranks, in messages that are their own flags, and reduces what it receives.

use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::reduce::Number;
use cuda_std::vector::{Accumulate, Vec16};
use half::{bf16, f16};
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window};

/// What an all-reduce does with the elements of the ranks, in `f32`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, KernelParam)]
pub struct Reduction {
    /// [`SUM`](Self::SUM), [`MAX`](Self::MAX) or [`MIN`](Self::MIN).
    pub operator: u32,
    /// A factor of this rank's elements, which are then rounded.
    pub input: f32,
    /// A factor of each result.
    pub output: f32,
}

impl Reduction {
    /// The operator of sums.
    pub const SUM: u32 = 0;
    /// The operator of largest elements.
    pub const MAX: u32 = 1;
    /// The operator of smallest elements.
    pub const MIN: u32 = 2;

    /// This rank's contribution.
    #[inline(always)]
    fn scale<T: Accumulate<Acc = f32>>(self, vector: Vec16<T>) -> Vec16<T> {
        if self.input == 1.0 {
            return vector;
        }
        let mut wide = T::widen(vector);
        T::map(&mut wide, |x| x * self.input);
        T::narrow(wide)
    }

    /// Reduces the vectors of all ranks, in their order.
    #[inline(always)]
    fn reduce<T: Accumulate<Acc = f32>, const N: usize>(self, vectors: [Vec16<T>; N]) -> Vec16<T> {
        let mut result = T::widen(vectors[0]);
        let mut i = 1;
        while i < N {
            let next = T::widen(vectors[i]);
            match self.operator {
                Self::SUM => T::zip(&mut result, next, |a, b| a + b),
                Self::MAX => T::zip(&mut result, next, Number::max),
                _ => T::zip(&mut result, next, Number::min),
            }
            i += 1;
        }
        T::map(&mut result, |x| x * self.output);
        T::narrow(result)
    }
}

/// `output[i]` becomes the reduction over the ranks of `input[i]`, for `i < count`, in every rank
/// of the LSA team, which has 2, 4 or 8.
///
/// f16 and bf16 are reduced in f32 and rounded once. All ranks get the same bits. `output` may be
/// `input`. -0 counts as +0.
///
/// `slots` and `state` are the memory of [`Lamport`] messages, with `capacity` slots for vectors
/// from each rank.
///
/// Grid and block: any, one-dimensional. May be a dependent launch. `count` is in elements, the
/// same in every rank.
///
/// # Safety
///
/// `input` and `output` have `count` elements, and nothing else accesses them until the kernel has
/// ended. `slots` and `state` are as [`LamportSlots`] needs them.
#[kernel(T = [f32, f16, bf16])]
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
    let part = Part { input, output, count, reduction };
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
    input: *const T,
    output: *mut T,
    count: usize,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<T> {
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn reduce<const N: usize>(&self, slots: LamportSlots<'_, N>, state: *mut u32) {
        let vectors = self.count.div_ceil(Vec16::<T>::LANES) as u32;
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
            if at * Vec16::<T>::LANES < self.count {
                // SAFETY: the caller's contract.
                mine[u] = unsafe { self.load_vector(at) };
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
            if at as usize * Vec16::<T>::LANES < self.count {
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
            if at as usize * Vec16::<T>::LANES < self.count {
                // SAFETY: the caller's contract.
                unsafe {
                    let all = session.receive_all(at, mine[u]);
                    self.store_vector(at as usize, self.reduction.reduce(all));
                }
            }
            u += 1;
        }
    }

    /// Loads a vector; elements behind the last one are 0.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the vector has an element.
    #[inline(always)]
    unsafe fn load_vector(&self, at: usize) -> Vec16<T> {
        let lanes = Vec16::<T>::LANES;
        let from = self.input.wrapping_add(at * lanes);
        // SAFETY: the caller's contract; only elements that there are are read.
        unsafe {
            if (at + 1) * lanes <= self.count && from.addr().is_multiple_of(16) {
                return mem::load_vec(from);
            }
            Vec16::from_fn(|i| match at * lanes + i < self.count {
                true => mem::load(from.wrapping_add(i)),
                false => T::from_acc(0.0),
            })
        }
    }

    /// Stores a vector's elements that there are.
    ///
    /// # Safety
    ///
    /// As [`load_vector`](Self::load_vector).
    #[inline(always)]
    unsafe fn store_vector(&self, at: usize, vector: Vec16<T>) {
        let lanes = Vec16::<T>::LANES;
        let to = self.output.wrapping_add(at * lanes);
        // SAFETY: the caller's contract.
        unsafe {
            if (at + 1) * lanes <= self.count && to.addr().is_multiple_of(16) {
                return mem::store_vec(to, vector);
            }
            let mut i = 0;
            while i < lanes && at * lanes + i < self.count {
                mem::store(to.wrapping_add(i), vector.lane(i));
                i += 1;
            }
        }
    }
}
