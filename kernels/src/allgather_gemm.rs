//! The all-gather of A's rows and the product, in one kernel, on Hopper.
//!
//! The product is that of [`gemm_wgmma`](crate::gemm::gemm_wgmma). One of the three warps that
//! neither load nor multiply pushes the rank's own rows to the peers, a few rows at a time, each
//! with a flag: as fast as the products need them, since faster pushes slow the products' loads.
//! Another one waits for the flags of the rows that the block needs next, and lets the loading
//! thread go on. A rank computes the tiles of its own rows first, then those of the next
//! rank's, and so on, in the order in which the rows arrive: while it multiplies its own rows, most
//! of the peers' rows arrive.
//!
//! It cannot deadlock: a warp that pushes waits for nothing but the previous kernel of its stream,
//! and a cooperative launch lets all these warps run. Other threads wait for what they push, or
//! within their block. No row is overwritten while it is read: the rows arrive in a bank of a
//! [`TileExchange`], and every rank waits for rows of each peer in each launch.

use cuda_std::atomic::Order as MemoryOrder;
use nccl_device::TileExchange;

use crate::files::gemm::prelude::*;

/// Rows that a warp pushes before it sets their flag.
const ROWS: u32 = 4;

/// This rank's rows of A, and the memory to which the peers push theirs.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Gathered {
    /// This rank's `m / ranks` rows of A.
    pub rows: *const bf16,
    /// Two banks with room for all of A, at the beginning and in the middle of the window.
    pub banks: Window<bf16>,
    /// The flags of a [`TileExchange`]: [`gather_flags()`] words.
    pub flags: Window<u32>,
    /// The state of a [`TileExchange`].
    pub state: *mut u32,
}

/// Gathers A's rows and computes `C = A x B^T` in bf16, where each rank has the same number of rows
/// of A.
///
/// `own` is the map of this rank's rows, `first` and `second` are those of A in the two banks.
/// These maps, `b`, `c`, `unaligned`, the block and the grid are as for
/// [`gemm_wgmma`](crate::gemm::gemm_wgmma::gemm_wgmma()), with `k` a multiple of 8 and no factor
/// stored transposed. `n` may differ between the ranks.
///
/// # Safety
///
/// As for `gemm_wgmma`; `m` is a multiple of the number of ranks, all in the LSA team. The rows and
/// the banks begin at multiples of 16 bytes. Only this kernel uses the banks, the flags and the
/// state, whose words were 0 in every rank before the first launch in any. All ranks launch it in
/// the same order, with the same `m` and `k` and with windows of the same lengths.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn allgather_gemm(
    comm: DevComm,
    gathered: Gathered,
    own: GridConstant<TensorMap>,
    first: GridConstant<TensorMap>,
    second: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    unaligned: *mut bf16,
    m: u32,
    n: u32,
    k: u32,
) {
    let (team, maps) = (comm.lsa_team(), [&*first, &*second]);
    let rows_per_rank = m / team.n_ranks as u32;
    let first = team.rank as u32 * rows_per_rank;
    let gather =
        Gather { comm: &comm, team, gathered: &gathered, maps, rows_per_rank, first, m, k };
    if thread::thread_idx_x() == 0 {
        // SAFETY: no other thread uses the word before the barrier.
        unsafe { mem::store(arrived(), 0) };
    }
    thread::sync_threads();
    // SAFETY: the kernel's caller passes the matrices and windows. The product ends with a barrier,
    // after which one thread ends the exchange.
    unsafe {
        let (maps, epilogue) = ([&*own, &*b, &*c], Identity::<bf16>::new());
        let extents = [m, n, k];
        Product::<bf16, _, _>::new(maps, unaligned, extents, [false; 2], epilogue, &gather).run();
        if thread::thread_idx_x() == 0 {
            gather.exchange().end(Coop::thread());
        }
    }
}

/// Returns how many words the window of the flags has, for up to `m` rows and this number of ranks.
#[must_use]
pub const fn gather_flags(m: usize, ranks: usize) -> usize {
    ranks * (m / ranks).div_ceil(ROWS as usize)
}

/// The number of tiles that means that no more rows arrive.
const ABORTED: u32 = u32::MAX;

/// Returns two words in shared memory: how many of the block's tiles have their rows, and the bank.
fn arrived() -> *mut u32 {
    shared_array![u32; 2]
}

/// The hooks of the product, which gather the rows of A of all ranks.
#[derive(Clone, Copy)]
struct Gather<'a> {
    comm: &'a DevComm,
    team: Team,
    gathered: &'a Gathered,
    /// A's maps in the two banks.
    maps: [&'a TensorMap; 2],
    rows_per_rank: u32,
    /// This rank's first row of A.
    first: u32,
    m: u32,
    k: u32,
}

impl Gather<'_> {
    /// Returns the exchange of this launch, under the kernel's contract, after previous kernels.
    unsafe fn exchange(&self) -> TileExchange<'_, bf16> {
        let Gathered { banks, flags, state, .. } = *self.gathered;
        // SAFETY: the caller passes the exchange's windows and state, after the previous kernels.
        unsafe { TileExchange::begin(self.comm, banks, flags, state) }
    }

    /// Returns whether all rows of a block's tile, from `row` on, are this rank's.
    fn is_own(&self, row: u32) -> bool {
        row >= self.first && (row + TILE_M).min(self.m) <= self.first + self.rows_per_rank
    }

    /// Returns the number of messages of each rank to each other rank.
    fn messages(&self) -> u32 {
        self.rows_per_rank.div_ceil(ROWS)
    }

    /// Returns the number of the message that has a row, among those of all ranks.
    fn message(&self, row: u32) -> u32 {
        row / self.rows_per_rank * self.messages() + row % self.rows_per_rank / ROWS
    }

    /// Waits for the rows of the block's tiles, one tile after the other. The kernel's contract
    /// holds; one warp of the block calls it, all lanes together.
    unsafe fn watch(&self, order: Order) {
        // SAFETY: the caller passes the exchange's windows, after the previous kernels.
        let exchange = unsafe { self.exchange() };
        let bank = exchange.bank();
        if warp::lane_id() == 0 {
            tma::prefetch_map(if bank == 0 { self.maps[0] } else { self.maps[1] });
            // SAFETY: the word is read only after what this lane releases below.
            unsafe { mem::store(arrived().add(1), bank) };
        }
        let (mut tile, mut tiles, mut all) = (cluster(), 0, true);
        while all && tile < order.count() {
            let Tile { row, .. } = order.tile(tile);
            let end = (row + TILE_M).min(self.m); // A cluster's second tile may begin after it.
            if row < end && !self.is_own(row) {
                let last = self.message(end - 1);
                let mut message = self.message(row) + warp::lane_id();
                while all && message <= last {
                    all = self.wait_for(&exchange, message);
                    message += warp::WARP_SIZE;
                }
            }
            tile += clusters();
            tiles += 1;
            // SAFETY: all lanes call these; the word is the block's, and written by ordered stores.
            unsafe {
                all = warp::all(all);
                warp::sync();
                if warp::lane_id() == 0 {
                    let tiles = if all { tiles } else { ABORTED };
                    mem::store_ordered(arrived(), tiles, MemoryOrder::Release, Scope::Cta);
                }
            }
        }
    }

    /// Waits for a message. Returns whether it has arrived; if not, the host has aborted the wait.
    fn wait_for(&self, exchange: &TileExchange<'_, bf16>, message: u32) -> bool {
        let arrives = self.comm.wait_until_or_abort(|| {
            // SAFETY: there is a flag for each message.
            let has_arrived = unsafe { exchange.has_arrived(message) };
            if !has_arrived {
                // The warps that multiply need the power.
                thread::nanosleep(500);
            }
            has_arrived
        });
        arrives.is_ok()
    }

    /// Pushes the rank's rows to the peers, and those in tiles with rows of a peer also to itself.
    /// The kernel's contract holds; one warp of each block calls it, all lanes together.
    unsafe fn push(&self) {
        // SAFETY: the caller passes the exchange's windows, after the previous kernels.
        let exchange = unsafe { self.exchange() };
        let (ranks, messages) = (self.team.n_ranks as u32, self.messages());
        let element = |row: u32| row as usize * self.k as usize;
        for item in thread::blocks_strided(ranks * messages) {
            let (distance, message) = (item / messages, item % messages); // 0 is to itself.
            if distance > 0 || self.is_shared(message) {
                // The rank before this one needs these rows first.
                let to = self.team.rotated((ranks - distance) as i32);
                let row = message * ROWS;
                let from = self.gathered.rows.wrapping_add(element(row));
                let len = element((self.rows_per_rank - row).min(ROWS));
                let (tile, at) =
                    (self.team.rank as u32 * messages + message, element(self.first + row));
                // SAFETY: the kernel's caller guarantees the rank's rows and room for them in the
                // bank, and nothing else accesses them before their flag is set.
                unsafe { exchange.push(Coop::warp(), to, tile, at, from, len) };
            }
        }
    }

    /// Returns whether rows of this rank's message are in tiles with rows of a peer.
    fn is_shared(&self, message: u32) -> bool {
        let first = self.first + message * ROWS;
        let last = (first + ROWS).min(self.first + self.rows_per_rank) - 1;
        !self.is_own(first / TILE_M * TILE_M) || !self.is_own(last / TILE_M * TILE_M)
    }
}

impl Hooks for Gather<'_> {
    type Registers = CopyingRegisters;

    /// Returns the order that begins with the rank's own rows, in parts of at least a row of tiles.
    fn order(&self, extents: [u32; 2]) -> Order {
        let height = (self.rows_per_rank / CLUSTER_M).max(1);
        Order::parts(extents, self.first.div_ceil(CLUSTER_M), height)
    }

    unsafe fn a_tile<'m>(&'m self, a: &'m TensorMap, tiles: u32, row: u32) -> (&'m TensorMap, u32) {
        if self.is_own(row) {
            return (a, row - self.first);
        }
        let mut arrived_tiles = 0;
        let arrives = self.comm.wait_until_or_abort(|| {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            arrived_tiles =
                unsafe { mem::load_ordered(arrived(), MemoryOrder::Acquire, Scope::Cta) };
            arrived_tiles > tiles
        });
        if arrives.is_err() || arrived_tiles == ABORTED {
            // The product means nothing, but the block ends.
            return (a, 0);
        }
        tma::fence_async_global();
        // SAFETY: the bank was stored before the number of tiles was, which this thread acquired.
        let bank = unsafe { mem::load(arrived().add(1)) };
        (if bank == 0 { self.maps[0] } else { self.maps[1] }, row)
    }

    unsafe fn run_idle_warp(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        // SAFETY: the caller has all lanes of the warp here, after the previous kernels.
        unsafe {
            match index {
                0 => self.push(),
                1 => self.watch(order),
                _ => {}
            }
        }
    }
}
