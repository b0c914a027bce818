//! `mbarrier` and TMA.

use core::arch::asm;

use devcomm_types::TensorMap;

use super::tensor::shared_address;

#[inline(always)]
pub(crate) fn mbarrier_init(word: *mut u64, arrivals: u32) {
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    unsafe {
        asm!(
            "mbarrier.init.shared::cta.b64 [{}], {};",
            in(reg32) shared_address(word),
            in(reg32) arrivals,
            options(nostack),
        );
    }
}

#[inline(always)]
pub(crate) fn mbarrier_fence_init() {
    // SAFETY: orders memory.
    unsafe {
        asm!(
            "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
            options(nostack),
        );
    }
}

#[inline(always)]
pub(crate) fn mbarrier_arrive(word: *mut u64) {
    // SAFETY: as in `mbarrier_init`.
    unsafe {
        asm!(
            "mbarrier.arrive.shared::cta.b64 _, [{}];",
            in(reg32) shared_address(word),
            options(nostack),
        );
    }
}

#[inline(always)]
pub(crate) fn mbarrier_arrive_expect_tx(word: *mut u64, bytes: u32) {
    // SAFETY: as in `mbarrier_init`.
    unsafe {
        asm!(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};",
            in(reg32) shared_address(word),
            in(reg32) bytes,
            options(nostack),
        );
    }
}

#[inline(always)]
pub(crate) fn mbarrier_try_wait(word: *mut u64, parity: u32) -> bool {
    let ended: u32;
    // SAFETY: as in `mbarrier_init`.
    unsafe {
        asm!(
            "{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{word}], {parity}; \
             selp.u32 {ended}, 1, 0, p; }}",
            word = in(reg32) shared_address(word),
            parity = in(reg32) parity,
            ended = out(reg32) ended,
            options(nostack),
        );
    }
    ended != 0
}

#[inline(always)]
pub(crate) unsafe fn load_tile(
    to: *mut u8,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: *mut u64,
) {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
             [{to}], [{map}, {{{column}, {row}}}], [{barrier}];",
            to = in(reg32) shared_address(to),
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            barrier = in(reg32) shared_address(barrier),
            options(nostack),
        );
    }
}

#[inline(always)]
pub(crate) fn prefetch_map(map: &TensorMap) {
    // SAFETY: a hint.
    unsafe {
        asm!("prefetch.tensormap [{}];", in(reg64) core::ptr::from_ref(map), options(nostack));
    }
}
