//! A few numbers: reductions of warps and blocks, all-reduces inside a kernel, rounding, and views.

use cuda_std::collective::segment_reduce;
use cuda_std::prelude::*;
use cuda_std::reduce::{SoftmaxSum, arg_max};
use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle, Window};

/// What [`reduce_numbers()`] stores for each thread.
pub const RESULTS: usize = 11;

/// Reduces each thread's element of `x` over the block and the warp: maximum and its index, the
/// denominator of the softmax, the warp's sum and minimum, the sum of four lanes, the largest
/// thread number of the warp, the sum of the lanes up to this one, and the number of lanes with
/// this one's number. One block.
#[kernel]
pub unsafe fn reduce_numbers(x: *const f32, out: *mut f32) {
    let thread = thread::thread_idx_x();
    // SAFETY: the crate's contract; all threads call the reductions.
    unsafe {
        let mine = mem::load(x.add(thread as usize));
        let largest = block_reduce(mine, f32::NEG_INFINITY, f32::max);
        let (again, place) = block_reduce((mine, thread), (f32::NEG_INFINITY, u32::MAX), arg_max);
        let soft = SoftmaxSum::of(mine);
        let SoftmaxSum { max, sum } = block_reduce(soft, SoftmaxSum::EMPTY, SoftmaxSum::combine);
        let both = |a: [f32; 2], b: [f32; 2]| [a[0] + b[0], a[1].min(b[1])];
        let [of_warp, least] = warp_reduce([mine, mine], both);
        let of_four = segment_reduce::<4, f32>(mine, |a, b| a + b);
        let last = warp_min(u32::MAX - thread);
        let last = (u32::MAX - last) as f32;
        let place = place as f32;
        let prefix = warp_prefix_sum(mine);
        let same = warp::match_any(mine.to_bits()).count_ones() as f32;
        let results =
            [largest, again, place, max, sum, of_warp, least, of_four, last, prefix, same];
        let mut i = 0;
        while i < RESULTS {
            mem::store(out.add(thread as usize * RESULTS + i), results[i]);
            i += 1;
        }
    }
}

/// Computes `rounds` times the sum and the maximum of a number of each rank, by the whole block and
/// then by each of its two warps, by multicast if the device communicator has it. Each thread
/// stores its three pairs of each round.
#[kernel]
pub unsafe fn all_reduce_numbers(comm: DevComm, exchange: LlA2aHandle, out: *mut u64, rounds: u32) {
    let (rank, thread) = (comm.lsa_team().rank as u32, thread::index_1d() as usize);
    let both = |a: [u32; 2], b: [u32; 2]| [a[0] + b[0], a[1].max(b[1])];
    let (block, warp) = (thread::block_idx_x(), warp::warp_id());
    // SAFETY: the host created the memory for three sessions per block, and `out` has three pairs
    // per thread and round; the multicast mapping is that of the team.
    unsafe {
        let sessions = 3 * thread::grid_dim_x();
        let mut buffer = LlA2aBuffer::new(&comm, comm.lsa_team(), exchange, sessions);
        if let Some(handle) = comm.lsa_multimem() {
            buffer = buffer.over_multimem(handle);
        }
        let mut at = thread * 3 * rounds as usize;
        let mut store = |[sum, max]: [u32; 2]| {
            mem::store(out.add(at), u64::from(sum) | u64::from(max) << 32);
            at += 1;
        };
        for round in 0..rounds {
            let number = 10 * rank + round + block;
            let of_block = buffer.all_reduce(Coop::cta(), 3 * block, [number; 2], both);
            store(of_block);
            let session = 3 * block + 1 + warp;
            buffer.with(Coop::warp(), session, comm.lsa_team().n_ranks as u32, |session| {
                let mine = number + warp;
                let of_warp = session.all_reduce([mine; 2], both);
                store(of_warp);
                store(session.all_reduce(of_warp, both));
            });
        }
    }
}

/// Rounds: `y` becomes `x` rounded to `T`, and `even` each element rounded to an integer, ties to
/// even; 16 elements per thread.
#[kernel(T = [f32, f16, bf16])]
pub unsafe fn round_numbers<T: Accumulate<Acc = f32>>(x: *const f32, y: *mut T, even: *mut f32) {
    let first = 16 * thread::index_1d() as usize;
    // SAFETY: the test passes buffers with these elements.
    unsafe {
        let values = mem::load_as_f32::<f32, 16>(x.add(first));
        mem::store_from_f32(y.add(first), values);
        let rounded = mem::load_as_f32::<T, 16>(y.add(first)).map(GpuFloat::round_ties_even);
        mem::store_from_f32(even.add(first), rounded);
    }
}

/// Transposes: the matrix `x` without its first row and first `skip` columns, transposed, becomes
/// the elements of `y` with the indices `[1, .., ..]`; a row of `x` per warp.
#[kernel]
pub unsafe fn transpose_part(
    x: Window<f32>,
    y: Window<f32>,
    rows: usize,
    columns: usize,
    skip: usize,
) {
    // SAFETY: the crate's contract: `y` has two matrices of `columns` rows.
    unsafe {
        let x = x.local().view([rows, columns]);
        let x = x.part([1, skip], [rows - 1, columns - skip]);
        let y = y.local().view([2, columns, rows]);
        for row in thread::warps_strided(rows - 1) {
            let mut column = warp::lane_id() as usize;
            while column < columns - skip {
                let value = x.transposed().load([column, row]);
                y.store([1, column, row], value);
                column += 32;
            }
        }
    }
}

/// Loads the element after the end of a row. It is in the window's memory, as the next row's first.
#[kernel]
pub unsafe fn load_behind_row(x: Window<f32>, out: *mut f32, columns: usize) {
    // SAFETY: the element is outside the row, which the test is for.
    unsafe { mem::store(out, x.local().view([2, columns]).load([0, columns])) };
}
