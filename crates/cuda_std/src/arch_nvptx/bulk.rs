//! `mbarrier`, TMA and clusters.

use core::arch::asm;

use devcomm_types::TensorMap;

use super::memory::EVICT_FIRST;
use super::tensor::SharedAddress;

instructions! { [nostack]
    // The word is a barrier's, by the contract of `MBarrier::at`. Each block of a cluster has the
    // barrier at this address.
    fn mbarrier_init(word: SharedAddress, arrivals: u32):
        "mbarrier.init.shared::cta.b64 [{word}], {arrivals};", in(reg32: word arrivals);
    fn mbarrier_fence_init(): "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;";
    fn mbarrier_arrive(word: SharedAddress):
        "mbarrier.arrive.shared::cta.b64 _, [{word}];", in(reg32: word);
    fn mbarrier_arrive_expect_tx(word: SharedAddress, bytes: u32):
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{word}], {bytes};", in(reg32: word bytes);
    fn mbarrier_arrive_cluster(word: SharedAddress, block: u32):
        "{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {word}, {block}; \
         mbarrier.arrive.shared::cluster.b64 _, [remote]; }}",
        in(reg32: word block);
    fn mbarrier_ended(word: SharedAddress, parity: u32) -> u32:
        "{{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{word}], {parity}; \
         selp.u32 {ended}, 1, 0, p; }}",
        in(reg32: word parity), out(reg32: ended) => ended;

    // The caller keeps source and target valid until the copy has ended.
    unsafe fn load_tile(
        to: SharedAddress, map: *const TensorMap, row: u32, column: u32, barrier: SharedAddress
    ):
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes \
         [{to}], [{map}, {{{column}, {row}}}], [{barrier}];",
        in(reg32: to column row barrier; reg64: map);
    unsafe fn load_tile_multicast(
        to: SharedAddress, map: *const TensorMap, row: u32, column: u32, barrier: SharedAddress,
        blocks: u16
    ):
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes\
         .multicast::cluster [{to}], [{map}, {{{column}, {row}}}], [{barrier}], {blocks};",
        in(reg32: to column row barrier; reg64: map; reg16: blocks);
    unsafe fn load_tile_with(
        to: SharedAddress, map: *const TensorMap, row: u32, column: u32, barrier: SharedAddress,
        policy: u64
    ):
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes\
         .L2::cache_hint [{to}], [{map}, {{{column}, {row}}}], [{barrier}], {policy};",
        in(reg32: to column row barrier; reg64: map policy);
    unsafe fn store_tile(map: *const TensorMap, row: u32, column: u32, from: SharedAddress):
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{map}, {{{column}, {row}}}], \
         [{from}];",
        in(reg64: map; reg32: column row from);
    unsafe fn reduce_add_tile(map: *const TensorMap, row: u32, column: u32, from: SharedAddress):
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group \
         [{map}, {{{column}, {row}}}], [{from}];",
        in(reg64: map; reg32: column row from);
    unsafe fn store_bulk(to: *mut u8, from: SharedAddress, bytes: u32):
        "{{ .reg .u64 to; cvta.to.global.u64 to, {to}; \
         cp.async.bulk.global.shared::cta.bulk_group [to], [{from}], {bytes}; }}",
        in(reg64: to; reg32: from bytes);

    fn commit_stores(): "cp.async.bulk.commit_group;";
    fn fence_async_shared(): "fence.proxy.async.shared::cta;";
    fn fence_async_global(): "fence.proxy.async.global;";
    // A hint, at the address of a live map.
    fn prefetch_map(map: *const TensorMap): "prefetch.tensormap [{map}];", in(reg64: map);

    // The address lies in shared memory and is aligned; no other thread writes what is read here,
    // or accesses what is written. The block `block` is running.
    unsafe fn load_shared(from: SharedAddress) -> [u32; 4]:
        "ld.shared.v4.u32 {{{a}, {b}, {c}, {d}}}, [{from}];",
        in(reg32: from), out(reg32: a b c d) => [a, b, c, d];
    unsafe fn load_shared_u16(from: SharedAddress) -> u16:
        "ld.shared.u16 {value}, [{from}];", in(reg32: from), out(reg16: value) => value;
    unsafe fn load_shared_u32(from: SharedAddress) -> u32:
        "ld.shared.u32 {value}, [{from}];", in(reg32: from), out(reg32: value) => value;
    unsafe fn store_shared_pair(to: SharedAddress, [a, b]: [u32; 2]):
        "st.shared.v2.u32 [{to}], {{{a}, {b}}};", in(reg32: to a b);
    unsafe fn store_shared(to: SharedAddress, [a, b, c, d]: [u32; 4]):
        "st.shared.v4.u32 [{to}], {{{a}, {b}, {c}, {d}}};", in(reg32: to a b c d);
    unsafe fn send_shared(
        to: SharedAddress, block: u32, [a, b, c, d]: [u32; 4], barrier: SharedAddress
    ):
        "{{ .reg .b32 remote, word; mapa.shared::cluster.u32 remote, {to}, {block}; \
         mapa.shared::cluster.u32 word, {barrier}, {block}; \
         st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 \
         [remote], {{{a}, {b}, {c}, {d}}}, [word]; }}",
        in(reg32: a b c d to block barrier);
    unsafe fn store_cluster_shared(to: SharedAddress, block: u32, [a, b, c, d]: [f32; 4]):
        "{{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {to}, {block}; \
         st.shared::cluster.v4.f32 [remote], {{{a}, {b}, {c}, {d}}}; }}",
        in(reg32: to block a b c d);

    // It is not `nomem`, so no access moves across it.
    fn wait_for_previous(): "griddepcontrol.wait;";
    fn launch_next(): "griddepcontrol.launch_dependents;";
    // The caller ensures that all threads of the cluster reach the barrier.
    fn cluster_sync():
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";
    fn cluster_sync_relaxed():
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;";
}

instructions! { [pure nomem nostack]
    fn cluster_size() -> u32: "mov.u32 {size}, %cluster_nctarank;", out(reg32: size) => size;
    fn cluster_rank() -> u32: "mov.u32 {rank}, %cluster_ctarank;", out(reg32: rank) => rank;
}

const_instructions! {
    wait_stores_read "cp.async.bulk.wait_group.read {};";
    wait_stores "cp.async.bulk.wait_group {};";
    raise_registers "setmaxnreg.inc.sync.aligned.u32 {};";
    lower_registers "setmaxnreg.dec.sync.aligned.u32 {};";
}

pub(crate) fn mbarrier_try_wait(word: SharedAddress, parity: u32) -> bool {
    mbarrier_ended(word, parity) != 0
}

pub(crate) fn mbarrier_wait(word: SharedAddress, parity: u32) {
    while !mbarrier_try_wait(word, parity) {}
}

pub(crate) unsafe fn load_tile_once(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
) {
    // SAFETY: the caller keeps room for the tile in shared memory until the barrier's phase ends.
    unsafe { load_tile_with(to, map, row, column, barrier, EVICT_FIRST) }
}

pub(crate) unsafe fn store_words(to: *mut u32, from: SharedAddress, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { store_bulk(to.cast(), from, bytes) }
}

pub(crate) unsafe fn store_cluster(to: *mut [f32; 4], block: u32, value: [f32; 4]) {
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe { store_cluster_shared(super::shared_address(to), block, value) }
}
