//! An exchange of a few numbers inside a kernel: the softmax of rows that are divided among ranks.

// ANCHOR: kernel
use cuda_std::math;
use cuda_std::prelude::*;
use nccl_device::{Coop, DevComm, LlA2aBuffer, LlA2aHandle};

/// A part of a row: its largest element, and the sum of `e^(x - largest)`.
type Part = [f32; 2];

/// Returns the largest element and the sum of two parts together.
fn merge(a: Part, b: Part) -> Part {
    let largest = a[0].max(b[0]);
    [largest, a[1] * math::exp(a[0] - largest) + b[1] * math::exp(b[0] - largest)]
}

/// Divides each `e^x` by the sum of its row. Every rank has `columns` elements of each of `rows`
/// rows, row-major.
///
/// # Safety
///
/// `x` points to these elements. `exchange` belongs to this device communicator, for `grid` blocks
/// and an element of 8 bytes for each rank. Grid: the same in every rank. Block: a warp.
#[kernel]
pub unsafe fn softmax_of_all(
    comm: DevComm,
    exchange: LlA2aHandle,
    x: *mut f32,
    rows: u32,
    columns: u32,
) {
    let (team, coop, blocks) = (comm.lsa_team(), Coop::cta(), thread::grid_dim_x());
    let (me, ranks) = (team.rank as u32, team.n_ranks as u32);
    // SAFETY: the caller passes a handle for these blocks, of this device communicator.
    let buffer = unsafe { LlA2aBuffer::new(&comm, team, exchange, blocks) };
    buffer.with(coop, thread::block_idx_x(), ranks, |session| {
        let mut row = thread::block_idx_x();
        while row < rows {
            // SAFETY: row is below rows.
            let x = unsafe { x.add(row as usize * columns as usize) };
            // The loops merge this lane's elements, then those of the warp; `all` is of all ranks.
            let mut mine: Part = [f32::MIN, 0.0];
            for i in coop.strided(columns as usize) {
                // SAFETY: i is below columns.
                mine = merge(mine, [unsafe { mem::load(x.add(i)) }, 1.0]);
            }
            let mut distance = 16;
            while distance > 0 {
                // SAFETY: all lanes of the warp are here.
                let theirs = unsafe { mine.map(|part| warp::shuffle_xor(part, distance)) };
                mine = merge(mine, theirs);
                distance /= 2;
            }
            if coop.thread_rank() == 0 {
                session.broadcast(me, mine);
            }
            let all = session.receive_reduce::<Part, 1>(0, ranks, 1, |part| part, merge);
            session.end_epoch();
            for i in coop.strided(columns as usize) {
                // SAFETY: i is below columns, and each lane has its own elements.
                unsafe {
                    let power = math::exp(mem::load(x.add(i)) - all[0]);
                    mem::store(x.add(i), power / all[1]);
                }
            }
            row += blocks;
        }
    });
}
// ANCHOR_END: kernel
