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

instructions! { [pure nomem nostack]
    fn lane_id() -> u32: "mov.u32 {lane}, %laneid;", out(reg32: lane) => lane;
}

instructions! { [nomem nostack]
    // It is not `pure`: the mask depends on the position in the code.
    fn active_mask() -> u32: "activemask.b32 {mask};", out(reg32: mask) => mask;

    // Registers are exchanged among the lanes, all of which are here, as the caller ensures.
    fn warp_min(value: u32) -> u32:
        "redux.sync.min.u32 {least}, {value}, 0xffffffff;",
        in(reg32: value), out(reg32: least) => least;
    fn match_any(value: u32) -> u32:
        "match.any.sync.b32 {lanes}, {value}, 0xffffffff;",
        in(reg32: value), out(reg32: lanes) => lanes;
    fn ballot_of(mask: u32, predicate: u32) -> u32:
        "{{ .reg .pred p; setp.ne.u32 p, {predicate}, 0; \
         vote.sync.ballot.b32 {lanes}, p, {mask}; }}",
        in(reg32: predicate mask), out(reg32: lanes) => lanes;
}

instructions! { [nostack]
    // The caller ensures that all threads reach a barrier: a wrong number of threads is a deadlock,
    // no more.
    fn barrier_all(): "bar.sync 0;";
    fn barrier(id: u32, count: u32): "barrier.sync {id}, {count};", in(reg32: id count);
    fn barrier_count_of(predicate: u32) -> u32:
        "{{ .reg .pred p; setp.ne.u32 p, {predicate}, 0; bar.red.popc.u32 {count}, 0, p; }}",
        in(reg32: predicate), out(reg32: count) => count;
    fn sync_warp(mask: u32): "bar.warp.sync {mask};", in(reg32: mask);

    fn nanosleep(nanos: u32): "nanosleep.u32 {nanos};", in(reg32: nanos);
    // They are neither `pure` nor `nomem`, so that they stay between the accesses around them.
    fn clock64() -> u64: "mov.u64 {cycles}, %clock64;", out(reg64: cycles) => cycles;
    fn globaltimer() -> u64: "mov.u64 {nanos}, %globaltimer;", out(reg64: nanos) => nanos;
}

pub(crate) fn ballot(mask: u32, predicate: bool) -> u32 {
    ballot_of(mask, predicate.into())
}

pub(crate) fn barrier_count(predicate: bool) -> u32 {
    barrier_count_of(predicate.into())
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
