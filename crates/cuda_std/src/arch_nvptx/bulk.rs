//! `mbarrier` and TMA.

use core::arch::asm;

use devcomm_types::TensorMap;

use super::memory::EVICT_FIRST;
use super::tensor::SharedAddress;

pub(crate) fn mbarrier_init(word: SharedAddress, arrivals: u32) {
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    unsafe {
        asm!(
            "mbarrier.init.shared::cta.b64 [{}], {};",
            in(reg32) word,
            in(reg32) arrivals,
            options(nostack),
        );
    }
}

pub(crate) fn mbarrier_fence_init() {
    // SAFETY: a fence accesses no memory.
    unsafe {
        asm!(
            "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
            options(nostack),
        );
    }
}

pub(crate) fn mbarrier_arrive(word: SharedAddress) {
    // SAFETY: the word is one of the block's barriers, by the contract of `MBarrier::at`.
    unsafe {
        asm!(
            "mbarrier.arrive.shared::cta.b64 _, [{}];",
            in(reg32) word,
            options(nostack),
        );
    }
}

pub(crate) fn mbarrier_arrive_expect_tx(word: SharedAddress, bytes: u32) {
    // SAFETY: the word is one of the block's barriers, by the contract of `MBarrier::at`.
    unsafe {
        asm!(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};",
            in(reg32) word,
            in(reg32) bytes,
            options(nostack),
        );
    }
}

pub(crate) fn mbarrier_try_wait(word: SharedAddress, parity: u32) -> bool {
    let ended: u32;
    // SAFETY: the word is one of the block's barriers, by the contract of `MBarrier::at`.
    unsafe {
        asm!(
            "{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{word}], {parity}; \
             selp.u32 {ended}, 1, 0, p; }}",
            word = in(reg32) word,
            parity = in(reg32) parity,
            ended = out(reg32) ended,
            options(nostack),
        );
    }
    ended != 0
}

pub(crate) fn mbarrier_wait(word: SharedAddress, parity: u32) {
    while !mbarrier_try_wait(word, parity) {}
}

pub(crate) unsafe fn load_tile(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
             [{to}], [{map}, {{{column}, {row}}}], [{barrier}];",
            to = in(reg32) to,
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            barrier = in(reg32) barrier,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn load_tile_once(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes\
             .L2::cache_hint [{to}], [{map}, {{{column}, {row}}}], [{barrier}], {policy};",
            to = in(reg32) to,
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            barrier = in(reg32) barrier,
            policy = in(reg64) EVICT_FIRST,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn load_tile_multicast(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
    blocks: u16,
) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes\
             .multicast::cluster [{to}], [{map}, {{{column}, {row}}}], [{barrier}], {blocks};",
            to = in(reg32) to,
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            barrier = in(reg32) barrier,
            blocks = in(reg16) blocks,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn store_tile(map: &TensorMap, row: u32, column: u32, from: SharedAddress) {
    // SAFETY: the caller keeps the tile in shared memory until the store has read it.
    unsafe {
        asm!(
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{map}, {{{column}, {row}}}], \
             [{from}];",
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            from = in(reg32) from,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn store_bulk(to: *mut u8, from: SharedAddress, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe {
        asm!(
            "{{ .reg .u64 to; cvta.to.global.u64 to, {to}; \
             cp.async.bulk.global.shared::cta.bulk_group [to], [{from}], {bytes}; }}",
            to = in(reg64) to,
            from = in(reg32) from,
            bytes = in(reg32) bytes,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn reduce_add_tile(map: &TensorMap, row: u32, column: u32, from: SharedAddress) {
    // SAFETY: the caller keeps the tile in shared memory until the store has read it.
    unsafe {
        asm!(
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group \
             [{map}, {{{column}, {row}}}], [{from}];",
            map = in(reg64) core::ptr::from_ref(map),
            column = in(reg32) column,
            row = in(reg32) row,
            from = in(reg32) from,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn store_words(to: *mut u32, from: SharedAddress, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { store_bulk(to.cast(), from, bytes) }
}

pub(crate) fn commit_stores() {
    // SAFETY: the instruction accesses no memory.
    unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
}

pub(crate) fn wait_stores_read<const N: u32>() {
    // SAFETY: the instruction only waits.
    unsafe { asm!("cp.async.bulk.wait_group.read {};", const N, options(nostack)) }
}

pub(crate) fn wait_stores<const N: u32>() {
    // SAFETY: the instruction only waits.
    unsafe { asm!("cp.async.bulk.wait_group {};", const N, options(nostack)) }
}

pub(crate) fn fence_async_shared() {
    // SAFETY: a fence accesses no memory.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

pub(crate) fn fence_async_global() {
    // SAFETY: a fence accesses no memory.
    unsafe { asm!("fence.proxy.async.global;", options(nostack)) }
}

pub(crate) fn mbarrier_arrive_cluster(word: SharedAddress, block: u32) {
    // SAFETY: as in `mbarrier_init`; each block of the cluster has the barrier at this address.
    unsafe {
        asm!(
            "{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {}, {}; \
             mbarrier.arrive.shared::cluster.b64 _, [remote]; }}",
            in(reg32) word,
            in(reg32) block,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn load_shared(from: SharedAddress) -> [u32; 4] {
    let (a, b, c, d);
    // SAFETY: the caller passes an aligned address in shared memory that no other thread writes.
    unsafe {
        asm!(
            "ld.shared.v4.u32 {{{}, {}, {}, {}}}, [{}];",
            out(reg32) a,
            out(reg32) b,
            out(reg32) c,
            out(reg32) d,
            in(reg32) from,
            options(nostack),
        );
    }
    [a, b, c, d]
}

pub(crate) unsafe fn load_shared_u16(from: SharedAddress) -> u16 {
    let value;
    // SAFETY: the caller passes an aligned address in shared memory that no other thread writes.
    unsafe { asm!("ld.shared.u16 {}, [{}];", out(reg16) value, in(reg32) from, options(nostack)) }
    value
}

pub(crate) unsafe fn load_shared_u32(from: SharedAddress) -> u32 {
    let value;
    // SAFETY: the caller passes an aligned address in shared memory that no other thread writes.
    unsafe { asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) from, options(nostack)) }
    value
}

pub(crate) unsafe fn store_shared_pair(to: SharedAddress, value: [u32; 2]) {
    // SAFETY: the caller passes an aligned address in shared memory that only this thread accesses.
    unsafe {
        asm!(
            "st.shared.v2.u32 [{}], {{{}, {}}};",
            in(reg32) to,
            in(reg32) value[0],
            in(reg32) value[1],
            options(nostack),
        );
    }
}

pub(crate) unsafe fn store_shared(to: SharedAddress, value: [u32; 4]) {
    // SAFETY: the caller passes an aligned address in shared memory that only this thread accesses.
    unsafe {
        asm!(
            "st.shared.v4.u32 [{}], {{{}, {}, {}, {}}};",
            in(reg32) to,
            in(reg32) value[0],
            in(reg32) value[1],
            in(reg32) value[2],
            in(reg32) value[3],
            options(nostack),
        );
    }
}

pub(crate) unsafe fn send_shared(
    to: SharedAddress,
    block: u32,
    value: [u32; 4],
    barrier: SharedAddress,
) {
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe {
        asm!(
            "{{ .reg .b32 remote, word; mapa.shared::cluster.u32 remote, {to}, {block}; \
             mapa.shared::cluster.u32 word, {barrier}, {block}; \
             st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 \
             [remote], {{{}, {}, {}, {}}}, [word]; }}",
            in(reg32) value[0],
            in(reg32) value[1],
            in(reg32) value[2],
            in(reg32) value[3],
            to = in(reg32) to,
            block = in(reg32) block,
            barrier = in(reg32) barrier,
            options(nostack),
        );
    }
}

pub(crate) unsafe fn store_cluster(to: *mut [f32; 4], block: u32, value: [f32; 4]) {
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe {
        asm!(
            "{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {}, {}; \
             st.shared::cluster.v4.f32 [remote], {{{}, {}, {}, {}}}; }}",
            in(reg32) super::shared_address(to),
            in(reg32) block,
            in(reg32) value[0],
            in(reg32) value[1],
            in(reg32) value[2],
            in(reg32) value[3],
            options(nostack),
        );
    }
}

pub(crate) fn wait_for_previous() {
    // SAFETY: the instruction only waits. It is not `nomem`, so no access moves across it.
    unsafe { asm!("griddepcontrol.wait;", options(nostack)) }
}

pub(crate) fn launch_next() {
    // SAFETY: the instruction accesses no memory.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) }
}

pub(crate) fn cluster_size() -> u32 {
    let size;
    // SAFETY: the instruction reads a special register.
    unsafe {
        asm!("mov.u32 {}, %cluster_nctarank;", out(reg32) size, options(pure, nomem, nostack));
    }
    size
}

pub(crate) fn cluster_rank() -> u32 {
    let rank;
    // SAFETY: the instruction reads a special register.
    unsafe {
        asm!("mov.u32 {}, %cluster_ctarank;", out(reg32) rank, options(pure, nomem, nostack));
    }
    rank
}

pub(crate) fn cluster_sync() {
    // SAFETY: a barrier accesses no memory; the caller ensures that all threads reach it.
    unsafe {
        asm!(
            "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
            options(nostack),
        );
    }
}

pub(crate) fn cluster_sync_relaxed() {
    // SAFETY: a barrier accesses no memory; the caller ensures that all threads reach it.
    unsafe {
        asm!(
            "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
            options(nostack),
        );
    }
}

pub(crate) fn raise_registers<const N: u32>() {
    // SAFETY: the instruction accesses no memory.
    unsafe { asm!("setmaxnreg.inc.sync.aligned.u32 {};", const N, options(nostack)) }
}

pub(crate) fn lower_registers<const N: u32>() {
    // SAFETY: the instruction accesses no memory.
    unsafe { asm!("setmaxnreg.dec.sync.aligned.u32 {};", const N, options(nostack)) }
}

pub(crate) fn prefetch_map(map: &TensorMap) {
    // SAFETY: the instruction is a hint, at the address of a live map.
    unsafe {
        asm!("prefetch.tensormap [{}];", in(reg64) core::ptr::from_ref(map), options(nostack));
    }
}
