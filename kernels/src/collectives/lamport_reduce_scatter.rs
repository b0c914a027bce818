//! Reduce-scatter of short messages within the LSA team in one step: every rank sends to each peer
//! the part that the peer reduces, in messages without separate flags (`Lamport`).

use super::prelude::*;

/// Reduces this rank's part: `output[i]` becomes the reduction over the ranks of `input[rank *
/// count + i]`, where `rank` is this rank, for `i < count`, in every rank of the LSA team, which
/// has 2, 4 or 8 ranks.
///
/// f16 and bf16 are reduced in f32 and rounded once. `output` may be `input + rank * count`. -0
/// may count as +0.
///
/// Grid: any. Block: at most 512 threads, one-dimensional. Dependent launch: allowed. `count` is in
/// elements, the same in every rank.
///
/// # Safety
///
/// `output` has `count` elements, and `input` `count` for each rank. Nothing else accesses them
/// until the kernel has ended. `memory` is as [`LamportSlots`] needs it.
#[kernel(T = [f32, f16, bf16], max_threads = 512, min_blocks = 2)]
pub unsafe fn lamport_reduce_scatter<T: Accumulate<Acc = f32>>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    output: *mut T,
    count: usize,
    reduction: Reduction,
) {
    let output = Elements::<_>::new(output, count);
    let part = Part { comm: &comm, input, output, count, reduction };
    // SAFETY: the kernel's caller guarantees the elements and the memory of the slots.
    unsafe { exchange(&comm, &memory, &part) }
}

struct Part<'a, T> {
    comm: &'a DevComm,
    input: *const T,
    output: Elements<T>,
    count: usize,
    reduction: Reduction,
}

impl<T: Accumulate<Acc = f32>> Part<'_, T> {
    /// Returns the part of the input that the rank `distance` after this one reduces.
    fn part(&self, distance: usize) -> Elements<T> {
        let rank = self.comm.lsa_team().rotated(distance as i32) as usize;
        Elements::<_>::new(self.input.wrapping_add(rank * self.count).cast_mut(), self.count)
    }
}

impl<T: Accumulate<Acc = f32>, const N: usize> OneStep<N> for Part<'_, T> {
    type Element = T;

    fn used(&self) -> u32 {
        self.output.vectors() as u32
    }

    unsafe fn prefetch(&self, slot: u32) {
        for distance in 1..N {
            // SAFETY: the input has a part for each rank, as the kernel's caller guarantees.
            unsafe { self.part(distance).prefetch(slot as usize) };
        }
    }

    /// Loads a vector of each peer's part, and zeros for this rank.
    unsafe fn load(&self, slot: u32) -> [Vec16<T>; N] {
        let mut loaded = [Vec16::from_bits([0; 4]); N];
        for distance in 1..N {
            // SAFETY: the input has a part for each rank, as the kernel's caller guarantees.
            loaded[distance] = unsafe { self.part(distance).load(slot as usize) };
        }
        loaded
    }

    unsafe fn send(&self, session: &Lamport<'_, N>, slot: u32, mine: &[Vec16<T>; N]) {
        for distance in 1..N {
            // SAFETY: the session has begun, and only this thread uses the slot.
            unsafe { session.send(distance, slot, self.reduction.scale(mine[distance])) };
        }
    }

    unsafe fn receive(&self, session: &Lamport<'_, N>, slot: u32) {
        // SAFETY: only this thread uses the slot; the kernel's caller guarantees the elements.
        unsafe {
            let mine = self.reduction.scale(self.part(0).load(slot as usize));
            let mut result = T::widen(mine); // Rank 0's vector is the first, and replaces it.
            session.receive_in_order(slot, mine, |rank, vector| match rank {
                0 => result = T::widen(vector),
                _ => self.reduction.combine(&mut result, vector),
            });
            self.output.store(slot as usize, self.reduction.finish(result));
        }
    }

    unsafe fn receive_two(&self, session: &Lamport<'_, N>, slots: [u32; 2]) {
        let (me, own) = (self.comm.lsa_team().rank as usize, self.part(0));
        // SAFETY: only this thread uses the slots; the kernel's caller guarantees the elements.
        unsafe {
            let mine = [own.load(slots[0] as usize), own.load(slots[1] as usize)];
            let theirs = session.receive_several::<T, 2>(1 - me, |i| Some(slots[i]), 0);
            for i in 0..2 {
                let mine = self.reduction.scale(mine[i]);
                let [first, second] = if me == 0 { [mine, theirs[i]] } else { [theirs[i], mine] };
                let mut result = T::widen(first);
                self.reduction.combine(&mut result, second);
                self.output.store(slots[i] as usize, self.reduction.finish(result));
            }
        }
    }
}
