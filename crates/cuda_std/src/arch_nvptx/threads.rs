//! Special registers, barriers, warp operations.

use core::arch::{asm, nvptx};

use super::Shuffle;

macro_rules! indices {
    ($($name:ident $x:ident $y:ident $z:ident;)*) => { $(
        pub(crate) fn $name(axis: usize) -> u32 {
            // SAFETY: the instruction reads a special register.
            unsafe {
                match axis {
                    0 => nvptx::$x(),
                    1 => nvptx::$y(),
                    _ => nvptx::$z(),
                }
            }
        }
    )* };
}

indices! {
    thread_idx _thread_idx_x _thread_idx_y _thread_idx_z;
    block_idx _block_idx_x _block_idx_y _block_idx_z;
    block_dim _block_dim_x _block_dim_y _block_dim_z;
    grid_dim _grid_dim_x _grid_dim_y _grid_dim_z;
}

pub(crate) fn lane_id() -> u32 {
    let lane;
    // SAFETY: the instruction reads a special register that never changes.
    unsafe { asm!("mov.u32 {}, %laneid;", out(reg32) lane, options(pure, nomem, nostack)) };
    lane
}

pub(crate) fn active_mask() -> u32 {
    let mask;
    // SAFETY: the instruction reads a special register. It is not `pure`: the mask depends on the
    // position in the code.
    unsafe { asm!("activemask.b32 {};", out(reg32) mask, options(nomem, nostack)) };
    mask
}

pub(crate) fn barrier_all() {
    // SAFETY: a barrier accesses no memory; the caller ensures that all threads reach it.
    unsafe { asm!("bar.sync 0;", options(nostack)) }
}

pub(crate) fn barrier(id: u32, count: u32) {
    // SAFETY: a barrier accesses no memory; a wrong number of threads is a deadlock, no more.
    unsafe { asm!("barrier.sync {}, {};", in(reg32) id, in(reg32) count, options(nostack)) }
}

pub(crate) fn barrier_count(predicate: bool) -> u32 {
    let count;
    // SAFETY: a barrier accesses no memory; a wrong number of threads is a deadlock, no more.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {predicate}, 0; bar.red.popc.u32 {count}, 0, p; }}",
            predicate = in(reg32) u32::from(predicate),
            count = out(reg32) count,
            options(nostack),
        );
    }
    count
}

/// Instructions that combine the threads' predicates `p` into a predicate `q`.
macro_rules! predicates {
    ($($name:ident($($arg:ident),*) $instruction:literal, $($option:ident)+;)*) => { $(
        pub(crate) fn $name($($arg: u32,)* predicate: bool) -> bool {
            let result: u32;
            // SAFETY: no memory is accessed; the caller ensures that all the threads are here.
            unsafe {
                asm!(
                    concat!(
                        "{{ .reg .pred p, q; setp.ne.u32 p, {predicate}, 0; ",
                        $instruction,
                        " selp.u32 {result}, 1, 0, q; }}"
                    ),
                    predicate = in(reg32) u32::from(predicate),
                    $($arg = in(reg32) $arg,)*
                    result = out(reg32) result,
                    options($($option),+),
                );
            }
            result != 0
        }
    )* };
}

predicates! {
    barrier_and() "bar.red.and.pred q, 0, p;", nostack;
    barrier_or() "bar.red.or.pred q, 0, p;", nostack;
    named_barrier_or(id, threads) "barrier.red.or.pred q, {id}, {threads}, p;", nostack;
    vote_all(mask) "vote.sync.all.pred q, p, {mask};", nomem nostack;
    vote_any(mask) "vote.sync.any.pred q, p, {mask};", nomem nostack;
}

pub(crate) fn exit() -> ! {
    // SAFETY: the instruction ends the thread.
    unsafe { asm!("exit;", options(nostack, noreturn)) }
}

pub(crate) fn nanosleep(nanos: u32) {
    // SAFETY: the instruction only waits.
    unsafe { asm!("nanosleep.u32 {};", in(reg32) nanos, options(nostack)) }
}

pub(crate) fn sync_warp(mask: u32) {
    // SAFETY: a barrier accesses no memory; the caller ensures that all lanes reach it.
    unsafe { asm!("bar.warp.sync {};", in(reg32) mask, options(nostack)) }
}

macro_rules! shfl {
    ($mode:literal, $mask:ident, $value:ident, $lane:ident, $clamp:ident) => {{
        let (result, in_range): (u32, u32);
        // SAFETY: it exchanges registers only; the caller ensures that the mask's lanes are here.
        unsafe {
            asm!(
                concat!(
                    "{{ .reg .pred p; shfl.sync.",
                    $mode,
                    ".b32 {result}|p, {value}, {lane}, {clamp}, {mask}; \
                     selp.u32 {in_range}, 1, 0, p; }}"
                ),
                result = out(reg32) result,
                in_range = out(reg32) in_range,
                value = in(reg32) $value,
                lane = in(reg32) $lane,
                clamp = in(reg32) $clamp,
                mask = in(reg32) $mask,
                options(nomem, nostack),
            );
        }
        (result, in_range != 0)
    }};
}

pub(crate) fn shuffle(mask: u32, mode: Shuffle, value: u32, lane: u32, width: u32) -> (u32, bool) {
    // The instruction's operand `c`. Bits 8 to 12: the bits of the lane number that a segment's
    // lanes have in common; bits 0 to 4: the segment's last lane (its first for `up`).
    let segment = (32 - width) << 8;
    let clamp = segment | 31;
    match mode {
        Shuffle::Index => shfl!("idx", mask, value, lane, clamp),
        Shuffle::Up => shfl!("up", mask, value, lane, segment),
        Shuffle::Down => shfl!("down", mask, value, lane, clamp),
        Shuffle::Xor => shfl!("bfly", mask, value, lane, clamp),
    }
}

pub(crate) fn warp_min(value: u32) -> u32 {
    let least;
    // SAFETY: only registers are exchanged; the caller ensures that all lanes are here.
    unsafe {
        asm!(
            "redux.sync.min.u32 {least}, {value}, 0xffffffff;",
            least = out(reg32) least,
            value = in(reg32) value,
            options(nomem, nostack),
        );
    }
    least
}

pub(crate) fn ballot(mask: u32, predicate: bool) -> u32 {
    let lanes;
    // SAFETY: only registers are exchanged; the caller ensures that all lanes of the mask are here.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {predicate}, 0; \
             vote.sync.ballot.b32 {lanes}, p, {mask}; }}",
            predicate = in(reg32) u32::from(predicate),
            lanes = out(reg32) lanes,
            mask = in(reg32) mask,
            options(nomem, nostack),
        );
    }
    lanes
}

pub(crate) fn clock64() -> u64 {
    let cycles;
    // SAFETY: the instruction reads a special register. It is neither `pure` nor `nomem`, so that
    // it stays between the accesses around it.
    unsafe { asm!("mov.u64 {}, %clock64;", out(reg64) cycles, options(nostack)) };
    cycles
}

pub(crate) fn globaltimer() -> u64 {
    let nanos;
    // SAFETY: the instruction reads a special register.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) nanos, options(nostack)) };
    nanos
}

pub(crate) fn opaque_usize(mut value: usize) -> usize {
    // SAFETY: the assembly is empty.
    unsafe { asm!("// {}", inout(reg64) value, options(nomem, nostack)) };
    value
}

pub(crate) fn opaque(mut value: u32) -> u32 {
    // SAFETY: the assembly is empty. It is not `pure`, so that LLVM does not move it.
    unsafe { asm!("// {}", inout(reg32) value, options(nomem, nostack)) };
    value
}
