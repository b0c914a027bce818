//! All-reduce within the LSA team in one step, of elements that may have any bits: integers, 64-bit
//! and 8-bit floats. Every rank sends its input to all ranks, in messages without separate flags
//! (`Lamport`), with marks like those of [`lamport_exchange`](super::lamport_exchange).

use cuda_std::reduce::Number;

use super::marks::slots;
use super::prelude::*;

/// Reduces `input` over the ranks: `output[i]` becomes the reduction of `input[i]`, for `i <
/// count`, in every rank of the LSA team, which has 2, 4 or 8 ranks.
///
/// `operator` is one of [`Reduction`]'s; the result is divided by a `divisor` above 1. 8-bit floats
/// are reduced in f32 and rounded once; integers wrap around, and quotients are rounded towards
/// zero. All ranks get the same bits. `output` may be `input`.
///
/// The launch uses [`slots`] of the message's bytes.
///
/// Grid: any. Block: a multiple of 32 threads up to 512, one-dimensional. Dependent
/// launch: allowed. `count` is in elements, the same in every rank.
///
/// # Safety
///
/// `input` and `output` have `count` elements, and nothing else accesses them until the kernel has
/// ended. `memory` is as [`LamportSlots`] needs it.
#[kernel(
    T = [i8, u8, i32, u32, i64, u64, f64, F8E4M3, F8E5M2],
    max_threads = 512,
    min_blocks = 1,
    requires(block.x.is_multiple_of(32))
)]
pub unsafe fn lamport_allreduce_any<T: Accumulate>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    output: *mut T,
    count: usize,
    operator: u32,
    divisor: u32,
) {
    let (input, output) = (Elements::new(input.cast_mut(), count), Elements::new(output, count));
    let used = slots(count * size_of::<T>()) as u32;
    let part = Part { input, output, used, operator, divisor };
    // SAFETY: the kernel's caller guarantees the elements and the memory of the slots.
    unsafe { exchange(&comm, &memory, &part) }
}

struct Part<T> {
    input: Elements<T>,
    output: Elements<T>,
    used: u32,
    operator: u32,
    divisor: u32,
}

impl<T: Accumulate> Part<T> {
    /// Returns the payload of a slot: 0 after the last element, and in the lane of the marks.
    unsafe fn payload(&self, slot: u32) -> Vec16<T> {
        match vector_of(slot) {
            // SAFETY: the kernel's caller guarantees the elements of the input.
            Some(at) => unsafe { self.input.load(at) },
            None => Vec16::from_bits([0; 4]),
        }
    }

    fn combine(&self, result: &mut T::Wide, vector: T::Wide) {
        match self.operator {
            Reduction::SUM => T::zip(result, vector, Number::wrapping_add),
            Reduction::PROD => T::zip(result, vector, Number::wrapping_mul),
            Reduction::MAX => T::zip(result, vector, Number::max),
            _ => T::zip(result, vector, Number::min),
        }
    }
}

impl<T: Accumulate, const N: usize> OneStep<N> for Part<T> {
    type Element = T;

    fn used(&self) -> u32 {
        self.used
    }

    unsafe fn load(&self, slot: u32) -> [Vec16<T>; N] {
        // SAFETY: the kernel's caller guarantees the elements of the input.
        [unsafe { self.payload(slot) }; N]
    }

    unsafe fn send(&self, session: &Lamport<'_, N>, slot: u32, mine: &[Vec16<T>; N]) {
        // SAFETY: a whole warp calls this, and only this thread uses the slot.
        unsafe {
            let message = marked(mine[0]);
            for distance in 1..N {
                session.send(distance, slot, message);
            }
        }
    }

    unsafe fn receive(&self, session: &Lamport<'_, N>, slot: u32) {
        let mut result = None;
        // SAFETY: the kernel's caller guarantees the elements; a warp's lanes call this together.
        unsafe {
            // The input is loaded again, since it would take registers until now.
            let mine = self.payload(slot);
            let all = session.receive_all(slot, mine);
            for rank in 0..N {
                let vector = T::widen(unmarked(all[rank]));
                match &mut result {
                    None => result = Some(vector),
                    Some(result) => self.combine(result, vector),
                }
            }
            if let (Some(mut result), Some(at)) = (result, vector_of(slot)) {
                if self.divisor > 1 {
                    T::map(&mut result, |x| x.div_count(self.divisor));
                }
                self.output.store(at, T::narrow(result));
            }
        }
    }
}
