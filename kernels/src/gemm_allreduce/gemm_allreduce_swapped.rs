//! The product of few rows of A and its sum over the ranks, on Hopper.
//!
//! The product is that of [`gemm_swapped`](crate::gemm::gemm_swapped), with an epilogue that sends
//! a thread's rounded sums to the same thread of each peer, and adds what the peers sent, before
//! the sums are stored: all of a tile is sent before any of it is received. A vector has the sums
//! as they lie in registers.

use crate::files::gemm::gemm_swapped::product;
use crate::files::gemm::prelude::*;
use crate::files::gemm::shapes::*;

/// The most vectors of sums that a thread stores together.
const VECTORS: usize = 2;
/// Rows of C of which a thread sends sums in one vector.
const ROWS: u32 = 16;
/// The slots of eight rows and [`WARPGROUP_N`] columns: one for each thread.
const SLOTS: u32 = 128;
/// The most ranks of which a thread polls a vector at the same time.
const AT_ONCE: usize = 4;
/// The named barrier of all threads that multiply; those of their warpgroups are 1 and 2.
const BARRIER: u32 = 8;

/// Computes `C = sum over the ranks of A x B^T` in bf16, for few rows: each rank's product is
/// rounded, and then their sum, which is in f32 and in the order of the ranks. All ranks get the
/// same bits.
///
/// `N` is 2 for two ranks, and [`ANY_RANKS`] for any other number.
///
/// The grid, the block and the maps are those of
/// [`gemm_swapped`](crate::gemm::gemm_swapped::gemm_swapped()). It uses [`slots()`] slots of
/// `memory`. Ranks launch with the same grid, `m`, `n`, `k` and `division`. -0 counts as +0.
///
/// # Safety
///
/// As for `gemm_swapped`. `memory` is as [`LamportSlots`] needs it, for the ranks of the LSA team.
#[kernel(arch = "sm_90a", max_threads = 384, S = [
    M8N64, M16N64, M32N64, M64N64, M96N64, M128N64, M8N128, M16N128, M32N128, M48N128, M64N128,
    M80N128, M128N128
], N = [2, 0])]
pub unsafe fn gemm_allreduce_swapped<S: Shape, const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
) {
    let used = m.div_ceil(8) * n.div_ceil(WARPGROUP_N) * SLOTS;
    let (comm, memory) = (&comm, &memory);
    // Tall tiles leave few registers.
    let at_once = if S::M < 128 { AT_ONCE } else { 1 };
    let exchange = Exchange::<N> { comm, memory, used, session: None, at_once };
    // SAFETY: the caller of the kernel passes matrices, slots and state as the product needs them.
    unsafe { product::<bf16, S, _>([&a, &b, &c], [m, n, k], division, exchange) }
}

/// Returns how many slots a product of `m x n` elements uses, if 32 bits count them.
#[must_use]
pub fn slots(m: usize, n: usize) -> Option<u32> {
    let blocks = m.div_ceil(8).checked_mul(n.div_ceil(WARPGROUP_N as usize))?;
    u32::try_from(blocks.checked_mul(SLOTS as usize)?).ok()
}

/// The epilogue that exchanges the sums.
#[derive(Clone, Copy)]
struct Exchange<'a, const N: usize> {
    comm: &'a DevComm,
    memory: &'a LamportMemory,
    used: u32,
    /// The session. After an abort its sums mean nothing, but the block ends: other threads wait
    /// for those that receive at named barriers, and for what these read at mbarriers.
    session: Option<Lamport<'a, N, false>>,
    /// The ranks of which a thread polls a vector at the same time, at most [`AT_ONCE`].
    at_once: usize,
}

impl<const N: usize> Exchange<'_, N> {
    /// Returns the slot of a thread's `i`-th vector, if some of its sums are stored.
    fn slot<F: Fragment>(&self, sums: &F, i: usize) -> Option<u32> {
        let (row, first) = (sums.row(0), ROWS * i as u32);
        let (end, n) = sums.end();
        let (column, columns) = (sums.column(0) / WARPGROUP_N, n.div_ceil(WARPGROUP_N));
        // A thread has a quarter of the rows. A cluster may have tiles beyond C.
        let is_stored = first < 4 * F::ROWS && row + first < end && column < columns;
        let block = (row + first) / 8 * columns + column;
        is_stored.then(|| block * SLOTS + thread::thread_idx_x() % SLOTS)
    }

    fn ranks(&self) -> usize {
        if N == ANY_RANKS { self.comm.lsa_team().n_ranks as usize } else { N }
    }

    /// Returns the sum over the ranks, in their order, of a slot's vectors: this rank's is `mine`.
    /// The peers' threads send to the slot, and this one receives.
    unsafe fn sum(
        &self,
        session: &Lamport<'_, N, false>,
        slot: u32,
        mine: Vec16<bf16>,
    ) -> [f32; 8] {
        let own = self.comm.lsa_team().rank as usize;
        let (mut sum, mut first) = ([0.0; 8], 0);
        while first < self.ranks() {
            let source = |i| {
                let is_polled = i < self.at_once && first + i < self.ranks();
                is_polled.then_some((first + i, slot))
            };
            let sent = |i| source(i).filter(|(rank, _)| *rank != own);
            let nothing = [Vec16::from_bits([0; 4]); AT_ONCE];
            // SAFETY: the peers' threads send to the slot, and this one alone receives.
            let theirs = unsafe { session.receive_each(nothing, sent, 0) };
            let mut i = 0;
            while i < self.at_once {
                // The vector is 0 if there is no rank for it.
                bf16::add(&mut sum, if first + i == own { mine } else { theirs[i] });
                i += 1;
            }
            first += self.at_once;
        }
        sum
    }

    /// Replaces the sums of a thread's `i`-th vector.
    fn replace<F: Fragment>(sums: &mut F, i: usize, by: [f32; 8]) {
        for lane in 0..by.len() {
            let (row, column) = Self::place(i, lane);
            if row < F::ROWS {
                *sums.sum(row, column) = by[lane];
            }
        }
    }

    /// Returns the row and the column of the sum in a lane of a thread's `i`-th vector.
    fn place(i: usize, lane: usize) -> (u32, u32) {
        (4 * i as u32 + (lane / 4 * 2 + lane % 2) as u32, (lane / 2 % 2) as u32)
    }

    /// Returns a thread's `i`-th vector, as peers receive it.
    fn vector<F: Fragment>(sums: &mut F, i: usize) -> Vec16<bf16> {
        let mut wide = [0.0; 8];
        for lane in 0..wide.len() {
            let (row, column) = Self::place(i, lane);
            if row < F::ROWS {
                wide[lane] = *sums.sum(row, column);
            }
        }
        message(bf16::narrow(wide))
    }
}

impl<const N: usize> Epilogue for Exchange<'_, N> {
    type Output = bf16;
    const SENDS_EARLY: bool = true;

    fn begin(self) -> Self {
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory, which this launch alone uses.
        let session = unsafe { LamportSlots::new(self.comm, self.memory).begin(self.used) };
        Self { session: Some(session.continue_after_abort()), ..self }
    }

    fn send_early<F: Fragment>(&self, sums: &mut F) {
        let Some(session) = &self.session else { return };
        for i in 0..VECTORS {
            if let Some(slot) = self.slot(sums, i) {
                let vector = Self::vector(sums, i);
                for distance in 1..self.ranks() {
                    // SAFETY: the slot is one of those used, and this thread's.
                    unsafe { session.send(distance, slot, vector) };
                }
            }
        }
    }

    fn apply<F: Fragment>(&self, sums: &mut F) {
        let Some(session) = &self.session else { return };
        if N != 2 {
            let mut i = 0; // A range would be unrolled.
            while i < VECTORS {
                if let Some(slot) = self.slot(sums, i) {
                    let mine = Self::vector(sums, i);
                    // SAFETY: the peers' threads send to the slot, and this one receives.
                    Self::replace(sums, i, unsafe { self.sum(session, slot, mine) });
                }
                i += 1;
            }
            return;
        }
        let peer = self.comm.lsa_team().rank as usize ^ 1;
        let sent = |i| self.slot(sums, i).map(|slot| (peer, slot));
        let nothing = [Vec16::from_bits([0; 4]); VECTORS];
        // SAFETY: the peer's thread sends to these slots, and this one receives.
        let theirs = unsafe { session.receive_each(nothing, sent, 0) };
        for i in 0..VECTORS {
            let mut wide = bf16::widen(Self::vector(sums, i));
            bf16::add(&mut wide, theirs[i]);
            Self::replace(sums, i, wide);
        }
    }

    fn end(&self, threads: u32) {
        thread::named_barrier_sync(BARRIER, threads);
        if let (0, Some(session)) = (thread::thread_idx_x(), &self.session) {
            // SAFETY: all threads that use the session have received all messages.
            unsafe { session.end(Coop::thread()) };
        }
    }
}
