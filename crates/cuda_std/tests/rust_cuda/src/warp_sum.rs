use cuda_std::prelude::*;
use cuda_std::{shared_array, warp};

/// Stores to `out[block]` the sum of the block's elements of `values`. Blocks have whole warps, at
/// most 32.
#[kernel]
#[allow(improper_ctypes_definitions)]
pub unsafe fn warp_sum(values: &[f32], out: *mut f32) {
    let slots = shared_array![f32; 32];
    let i = thread::index_1d() as usize;
    let mut sum = if i < values.len() { values[i] } else { 0.0 };
    for distance in [16, 8, 4, 2, 1] {
        sum += unsafe { warp::warp_shuffle_xor(u32::MAX, sum, distance, 32) }.0;
    }
    let (warp, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
    if lane == 0 {
        unsafe { *slots.add(warp as usize) = sum };
    }
    thread::sync_threads();
    if warp == 0 {
        let warps = thread::block_dim_x() / 32;
        let mut sum = if lane < warps { unsafe { *slots.add(lane as usize) } } else { 0.0 };
        let mut distance = 16;
        while distance > 0 {
            let (other, _) = unsafe { warp::warp_shuffle_down(u32::MAX, sum, distance, 32) };
            sum += other;
            distance /= 2;
        }
        if lane == 0 {
            unsafe { *out.add(thread::block_idx_x() as usize) = sum };
        }
    }
}
