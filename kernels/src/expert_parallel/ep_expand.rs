//! Copies the rows that a rank has received, in the order of its experts, to the other experts of
//! their tokens.

use super::prelude::*;

/// Completes `grouped.rows` after an `ep_dispatch_counted`. The dispatch has stored each row of
/// `ranks` ranks at the first of its places in `rows`, and this kernel copies it to the others. If
/// `grouped.rows` is `rows`, a row in its first place stays, and a token with one expert here is
/// not read; otherwise rows go to all their places in `grouped.rows`. The scales of a row of 8-bit
/// floats, [`Shape::scale_vectors`] vectors in `scales`, become a column of `grouped.scales`.
///
/// `grouped.origins` gets for each row its token: the rank times the most tokens of a rank, plus
/// the token's number.
///
/// Grid: any. Block: a multiple of 32 threads up to 512. Dependent launch: allowed.
///
/// # Safety
///
/// `memory`, `rows` and `scales` are as the dispatch has left them, `scales` null without scales,
/// and `grouped` has room for `grouped.capacity` rows, which is `memory.capacity`. Nothing else
/// accesses these until the kernel has ended.
#[kernel(max_threads = 512, requires(grouped.capacity == memory.capacity))]
pub unsafe fn ep_expand(
    memory: Counted,
    shape: Shape,
    ranks: u32,
    rows: *const u32,
    scales: *const f32,
    grouped: Grouped,
) {
    grid::launch_next();
    grid::wait_for_previous();
    let tokens = memory.tokens.local().as_ptr();
    let is_in_place = core::ptr::eq(rows, grouped.rows);
    // SAFETY: the kernel's caller guarantees the memory; all lanes of a warp take the same turns.
    unsafe {
        let received = Words(memory.firsts).load(ranks);
        for part in Parts::new(shape.vectors).of_grid(received) {
            let (token, lane) = (part.row as usize, warp::lane_id());
            let word = memory.returns(tokens, token).load(lane);
            let all = positions(word);
            let has_place = all >> lane & 1 == 1;
            let from = warp_min(if has_place { word } else { DROPPED });
            let others = if is_in_place { warp::ballot(has_place && word != from) } else { all };
            grouped.copy(shape, (rows, scales, from as usize), part, word, [others, all]);
            if part.is_first && has_place {
                let origin = memory.origin(tokens, token).load(0);
                Words(grouped.origins).store(word, origin);
            }
        }
    }
}
