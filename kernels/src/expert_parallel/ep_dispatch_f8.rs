//! [`ep_dispatch`](super::ep_dispatch) of 8-bit floats with scales.

use core::marker::PhantomData;

use cuda_std::prelude::*;
use devcomm_types::F8E4M3;
use half::bf16;
use nccl_device::{DevComm, Window};

use super::ep_dispatch::Dispatch;
use super::ranks::with_ranks;
use super::shape::{Received, Shape};

/// Vectors of a part that each lane has. A vector is made from two of the input, so that these are
/// half as many as those of `ep_dispatch`.
const fn lane_vectors(ranks: usize) -> usize {
    if ranks == 2 { 2 } else { 1 }
}

/// Vectors of the part of a row that a warp sends at a time.
#[must_use]
pub const fn part_vectors(ranks: usize) -> u32 {
    warp::WARP_SIZE * lane_vectors(ranks) as u32
}

/// [`ep_dispatch`](super::ep_dispatch::ep_dispatch()) of rows that become
/// [`F8E4M3`] with a scale for each 128 elements on their way, and arrive
/// so: an element of the input is about that one times its scale.
///
/// The scale is the least power of two, at least `2^-126`, times which 448 is no less than each of
/// the 128 elements. So an element divided by it is exact, and rounded once: to nearest, ties to
/// even. Infinities become 448 times the scale; NaN stays, and does not count for the scale.
///
/// `shape.vectors` are those of a row on its way, of 16 elements, and the window has slots for
/// [`Shape::scaled_slots`] vectors from each rank.
///
/// # Safety
///
/// As there; `input` has 16 elements for each vector of a row, and `received.scales` a vector for
/// each [`Shape::scale_vectors`] of a row.
#[kernel(max_threads = 512, requires(tokens <= shape.tokens, shape.top_k <= 16))]
pub unsafe fn ep_dispatch_f8(
    comm: DevComm,
    slots: Window<u32>,
    numbered: Window<u32>,
    state: *mut u32,
    shape: Shape,
    input: *const bf16,
    ids: *const i32,
    weights: *const f32,
    tokens: u32,
    received: Received,
    faults: *mut u32,
    steps: u32,
) {
    let dispatch = Dispatch::<F8E4M3> {
        comm: &comm,
        shape,
        tokens,
        input,
        ids,
        weights,
        received,
        faults,
        steps,
        rows: PhantomData,
    };
    // SAFETY: the kernel's contract.
    unsafe { with_ranks!(comm, lane_vectors, dispatch.run(slots, numbered, state)) }
}
