//! The products of [`gemm_wgmma`](crate::gemm::gemm_wgmma) that are added over the ranks.
//!
//! A warp that multiplies sends what it stores by [`PeerTiles`], from the same shared memory. The
//! three warps that neither load nor multiply take the rows of the block's tiles in turn, and add
//! what the ranks computed, in f32 and in the order of the ranks, while the next tiles are
//! multiplied. The rows of the block's last tile are added by the multiplying warps, each its own.
//! Each rank's product is rounded, and then the sum. All ranks get the same bits. -0 counts as +0.
//!
//! With two ranks, each rank adds all tiles. With more, each tile has an owner: all ranks send it
//! their parts, the owner too, and it stores the sums to all ranks. Then the blocks of all ranks
//! with the same index meet at a barrier before the first sum is stored, and at the end. In a
//! reduce-scatter each rank owns its rows.
//!
//! # The launches
//!
//! The grid, the block, the maps and the conditions are those of
//! [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()), with `n` a multiple of 8. Ranks launch
//! with the same grid and the same `m`, `n` and `k`. Matrices without a map begin at multiples of
//! 16 bytes. `memory` is as [`LamportSlots`] needs it for the ranks of the LSA team, with at least
//! the `slots` of the [`Owners`] for each rank.

use core::ptr::null_mut;

use nccl_device::{Everyone, Owners, PeerColumn, PeerTiles, RowOwners, TileOwners, message_word};

use super::quantised::Quantised;
pub use super::quantised::QuantisedParts;
pub use crate::files::gemm::gemm_wgmma::CLUSTER_M;
use crate::files::gemm::gemm_wgmma::STORE_M;
use crate::files::gemm::prelude::*;

/// The owners of the tiles of clusters, of more than two ranks.
pub type ClusterTileOwners = TileOwners<CLUSTER_M, TILE_N>;

/// Computes `C = sum over the two ranks of A x B^T` in bf16. `to` is C's address.
///
/// # Safety
///
/// The [module](self) has the conditions; the memory has the slots of [`Everyone`].
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn gemm_allreduce_wide(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    to: *mut bf16,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let peers = PeerTiles::<Everyone, 2>::new(&comm, &memory, to, [m, n]);
        compute_summed([&a, &b, &c], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Computes what [`gemm_allreduce_wide()`] does, but each rank's product is rounded to [`F8E4M3`],
/// with a scale for 64 columns of a row: half of the bytes travel. Only the sums are stored to C.
/// `own` is workspace, four words for each slot.
///
/// # Safety
///
/// The [module](self) has the conditions; the memory has the slots of [`QuantisedParts`]. Only this
/// kernel uses `own`.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn gemm_allreduce_wide_f8(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: *mut bf16,
    own: *mut u32,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes what the body needs. No map is used for C.
    unsafe {
        let peers = PeerTiles::new(&comm, &memory, c, [m, n]);
        let quantised = Quantised { peers, own, c };
        compute_summed([&a, &b, &a], [m, n, k], &peers, quantised, &quantised);
    }
}

/// Computes `C = sum over the N ranks of A x B^T` in bf16. C is the window `to`, and the grid has
/// at most as many blocks as the device communicator has LSA barriers.
///
/// # Safety
///
/// The [module](self) has the conditions; the memory has the slots of [`ClusterTileOwners`]. Until
/// the kernel has ended, only work that comes before it in its stream accesses `to`.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, N = [4, 8])]
pub unsafe fn gemm_allreduce_two_shot<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    to: Window<bf16>,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let own = to.local().as_ptr();
        let peers = PeerTiles::<ClusterTileOwners, N>::new(&comm, &memory, own, [m, n]);
        let peers = peers.stored_in_all(&to);
        compute_summed([&a, &b, &c], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Computes a rank's rows of the sum over N ranks of `A x B^T` in bf16, with `m` a multiple of
/// [`CLUSTER_M`] times the number of ranks.
///
/// `map` and `product` are of memory for this rank's product of `m x n` elements, which only this
/// kernel uses, and only for two ranks. `c` has the `m / ranks x n` sums of this rank's rows.
///
/// # Safety
///
/// The [module](self) has the conditions; the memory has the slots of [`RowOwners`].
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, N = [2, 4, 8])]
pub unsafe fn gemm_reduce_scatter_wide<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    map: GridConstant<TensorMap>,
    product: *mut bf16,
    c: *mut bf16,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller of the kernel passes matrices, slots and state as the body needs them.
    unsafe {
        let peers = PeerTiles::<RowOwners, N>::new(&comm, &memory, c, [m, n]);
        let peers = peers.kept_in(product);
        compute_summed([&a, &b, &map], [m, n, k], &peers, Identity::<bf16>::new(), &peers);
    }
}

/// Computes a product, with an epilogue, and adds it over the ranks. The conditions are those of
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()) of bf16 and of [`PeerTiles::new`]. The
/// whole block calls it.
unsafe fn compute_summed<O: Owners, const N: usize>(
    maps: [&TensorMap; 3],
    extents: [u32; 3],
    peers: &PeerTiles<'_, O, N>,
    epilogue: impl Epilogue,
    hooks: &impl Hooks,
) {
    peers.prepare();
    // SAFETY: the caller passes what the product needs, which ends with a barrier.
    unsafe {
        Product::<bf16, _, _>::new(maps, null_mut(), extents, [false; 2], epilogue, hooks).run();
        peers.end((MULTIPLYING_WARPS + IDLE_WARPS) * warp::WARP_SIZE);
    }
}

/// Returns the lane's column of one of the block's tiles, if this rank adds it.
fn column_of<const N: usize>(
    peers: &PeerTiles<'_, impl Owners, N>,
    Tile { row, column, .. }: Tile,
) -> Option<PeerColumn> {
    peers.column(row, column)
}

impl<O: Owners, const N: usize> Hooks for PeerTiles<'_, O, N> {
    type Registers = AddingRegisters;

    const SENDS: bool = true;
    const REPORTS: bool = N == 2;

    /// A cluster of a reduce-scatter computes the same tile of each rank's rows: with two ranks,
    /// its own rank's tile last; with more ranks, each cluster begins with another rank, so that
    /// all ranks receive at any time.
    fn order(&self, extents: [u32; 2]) -> Order {
        if O::ALL || O::BROADCASTS {
            return Order::whole(extents);
        }
        let matrix = self.matrix();
        let first = matrix.rank() + 1 + if N == 2 { 0 } else { cluster() };
        Order::by_turns(extents, first, matrix.ranks())
    }

    /// Returns the word as the peers receive it, so that all ranks add the same zeros.
    fn encode(&self, word: u32) -> u32 {
        message_word(word)
    }

    unsafe fn store_part<T>(&self, c: &TensorMap, row: u32, column: u32, tile: Store<T>) {
        // SAFETY: the caller is one lane, with a tile that was written before a fence.
        unsafe { self.keep(c, row, column, tile) };
    }

    unsafe fn send_part<T>(&self, row: u32, column: u32, tile: Store<T>) {
        // SAFETY: the caller is one lane with a stored tile; the launches before this have ended.
        unsafe { self.send(row, column, tile) };
    }

    fn on_stored(&self, warp: u32, tiles: u32) {
        self.stored(warp, tiles);
    }

    unsafe fn run_idle_warp(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        self.meet(index == 0); // One warp of the block passes `true`.
        let (mut tile, mut first) = (0, index * Self::AT_ONCE);
        // SAFETY: the caller has all lanes of the warp here. The rows are this warp's.
        unsafe {
            let sums = self.sums();
            // Opaque: the number of tiles less one would take a register.
            while hint::opaque(tile) + 1 < order.turns() {
                if let Some(column) = column_of(self, order.turn(tile)) {
                    let mut row = first;
                    while row < TILE_M {
                        self.wait_stored(row / STORE_M, tile);
                        sums.add(column, row);
                        row += IDLE_WARPS * Self::AT_ONCE;
                    }
                    // The warps take turns with the rows of all tiles.
                    first = row - TILE_M;
                }
                tile += 1;
            }
        }
        self.added();
    }

    unsafe fn drain(&self, order: Order, warp: u32) {
        let last = order.turns().checked_sub(1);
        if let Some(column) = last.and_then(|last| column_of(self, order.turn(last))) {
            let mut row = warp * STORE_M;
            // The loop is not unrolled: it would take more registers.
            let end = hint::opaque(row + STORE_M);
            // SAFETY: the caller has all lanes of the warp here. The rows are this warp's.
            unsafe {
                warp::sync();
                self.meet(false);
                let sums = self.sums();
                while row < end {
                    sums.add(column, row);
                    row += Self::AT_ONCE;
                }
            }
        }
        self.added();
    }
}
