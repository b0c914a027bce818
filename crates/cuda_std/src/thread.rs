//! Thread and block indices, launch dimensions, block barriers, fences.
//!
//! Indices are `u32`, as in the hardware. A launch has a grid of blocks and a block of threads,
//! each up to three-dimensional; kernels that take a `DevComm` run in one-dimensional blocks.
//!
//! # Safety model
//!
//! Reading an index is safe. The barriers are safe functions as in Rust-CUDA, but every thread of
//! the block must call the same one: otherwise the kernel hangs, or (in the simulator) ends with an
//! error that lists where threads wait.
//!
//! # Example
//!
//! ```
//! use cuda_std::thread;
//! # use cuda_std::mem;
//! /// Doubles `count` elements by the threads of a grid of any size.
//! unsafe fn double(x: *mut f32, count: usize) {
//!     for i in thread::grid_strided(count) {
//!         // SAFETY: `x` has `count` elements, and only this thread accesses element i.
//!         unsafe { mem::store(x.add(i), 2.0 * mem::load(x.add(i))) };
//!     }
//! }
//! ```

use crate::arch;
use crate::atomic::{Order, Scope, fence};
use crate::strided::{Index, Strided};

/// The number of threads in a warp.
pub const WARP_SIZE: u32 = 32;

/// An index or a size in two dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the dimensions")]
pub struct UVec2 {
    pub x: u32,
    pub y: u32,
}

/// An index or a size in three dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the dimensions")]
pub struct UVec3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl UVec3 {
    /// Returns `x * y * z`.
    pub const fn element_product(self) -> u32 {
        self.x * self.y * self.z
    }
}

macro_rules! special_registers {
    ($($register:ident: $doc:literal, $x:ident $y:ident $z:ident;)*) => { $(
        #[doc = concat!($doc, ".")]
        pub fn $register() -> UVec3 {
            UVec3 { x: $x(), y: $y(), z: $z() }
        }

        #[doc = concat!($doc, ": x.")]
        pub fn $x() -> u32 {
            arch::$register(0)
        }

        #[doc = concat!($doc, ": y.")]
        pub fn $y() -> u32 {
            arch::$register(1)
        }

        #[doc = concat!($doc, ": z.")]
        pub fn $z() -> u32 {
            arch::$register(2)
        }
    )* };
}

special_registers! {
    thread_idx: "Returns the index of the thread in its block",
        thread_idx_x thread_idx_y thread_idx_z;
    block_idx: "Returns the index of the block in the grid", block_idx_x block_idx_y block_idx_z;
    block_dim: "Returns the number of threads in a block", block_dim_x block_dim_y block_dim_z;
    grid_dim: "Returns the number of blocks in the grid", grid_dim_x grid_dim_y grid_dim_z;
}

/// Returns the index of the thread in the whole launch, for any number of dimensions: x varies
/// fastest, threads faster than blocks. The host refuses a launch of 2^32 threads or more.
pub fn index() -> u32 {
    let (grid, block) = (grid_dim(), block_idx());
    let block = (block.z * grid.y + block.y) * grid.x + block.x;
    block * block_dim().element_product() + index_in_block()
}

/// Returns the index of the thread in a one-dimensional launch.
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Returns, as in CUDA's grid-stride loop, the calling thread's share of `0..n` in a
/// one-dimensional launch, from its index on in steps of the number of threads in the grid. As for
/// every [`Strided`], `n` plus that number must fit the type.
pub fn grid_strided<N: Index>(n: N) -> Strided<N> {
    Strided::new(N::from_u32(index_1d()), n, N::from_u32(grid_dim_x() * block_dim_x()))
}

/// Returns a loop whose iterations are divided among the warps of a one-dimensional launch of whole
/// warps: the share of `0..n` of the calling thread's warp, from the warp's index in the grid on in
/// steps of the number of warps in the grid. All lanes of a warp get the same numbers.
pub fn warps_strided<N: Index>(n: N) -> Strided<N> {
    let warps = block_dim_x() / WARP_SIZE;
    let first = block_idx_x() * warps + thread_idx_x() / WARP_SIZE;
    Strided::new(N::from_u32(first), n, N::from_u32(grid_dim_x() * warps))
}

/// Returns the share of `0..n` of the calling thread's block in a one-dimensional launch, from the
/// block's index on in steps of the number of blocks. All threads of a block get the same numbers.
pub fn blocks_strided<N: Index>(n: N) -> Strided<N> {
    Strided::new(N::from_u32(block_idx_x()), n, N::from_u32(grid_dim_x()))
}

/// Returns the indices of the thread in a two-dimensional launch.
pub fn index_2d() -> UVec2 {
    UVec2 { x: index_1d(), y: block_idx_y() * block_dim_y() + thread_idx_y() }
}

/// Returns the indices of the thread in a three-dimensional launch.
pub fn index_3d() -> UVec3 {
    let UVec2 { x, y } = index_2d();
    UVec3 { x, y, z: block_idx_z() * block_dim_z() + thread_idx_z() }
}

/// Returns the index of the thread in its block, for any number of dimensions: x varies fastest.
pub fn index_in_block() -> u32 {
    let (dim, idx) = (block_dim(), thread_idx());
    (idx.z * dim.y + idx.y) * dim.x + idx.x
}

/// Returns whether this is the launch's first thread.
pub fn first() -> bool {
    let zero = UVec3 { x: 0, y: 0, z: 0 };
    block_idx() == zero && thread_idx() == zero
}

/// Executes a barrier of the block: writes to shared and global memory before it are visible to all
/// its threads after it.
///
/// Every thread of the block must call it, or the kernel hangs. PTX: `bar.sync 0`.
#[doc(alias = "__syncthreads")]
#[track_caller]
pub fn sync_threads() {
    arch::barrier_all();
}

/// Executes named barrier `id` (0 to 15; [`sync_threads`] uses 0) of `threads` threads of the
/// block, a multiple of the warp size.
///
/// It is for warp-specialized blocks. Every participating warp calls it with the same arguments.
/// NCCL's coop of a warp span uses barrier 1 plus the span's id. PTX: `barrier.sync id, threads`.
#[track_caller]
pub fn named_barrier_sync(id: u32, threads: u32) {
    arch::barrier(id, threads);
}

/// Does the same as [`sync_threads`], and returns the number of threads whose `predicate` is not
/// zero. PTX: `bar.red.popc`.
#[doc(alias = "__syncthreads_count")]
#[track_caller]
pub fn sync_threads_count(predicate: u32) -> u32 {
    arch::barrier_count(predicate != 0)
}

/// Does the same as [`sync_threads`], and returns whether every thread's `predicate` is not zero,
/// as 1 or 0. PTX: `bar.red.and`.
#[doc(alias = "__syncthreads_and")]
#[track_caller]
pub fn sync_threads_and(predicate: u32) -> u32 {
    arch::barrier_and(predicate != 0).into()
}

/// Does the same as [`sync_threads`], and returns whether any thread's `predicate` is not zero, as
/// 1 or 0. PTX: `bar.red.or`.
#[doc(alias = "__syncthreads_or")]
#[track_caller]
pub fn sync_threads_or(predicate: u32) -> u32 {
    arch::barrier_or(predicate != 0).into()
}

/// Does the same as [`named_barrier_sync`], and returns whether any thread's `predicate` is not
/// zero, as 1 or 0. PTX: `barrier.red.or`.
#[track_caller]
pub fn named_barrier_sync_or(id: u32, threads: u32, predicate: u32) -> u32 {
    arch::named_barrier_or(id, threads, predicate != 0).into()
}

/// Ends the calling thread. Barriers of the whole block no longer wait for the thread; named
/// barriers with a thread count still do. PTX: `exit`.
#[track_caller]
pub fn exit() -> ! {
    arch::exit()
}

/// Executes a sequentially consistent fence among the threads of the block.
#[doc(alias = "__threadfence_block")]
#[track_caller]
pub fn block_fence() {
    fence(Order::SeqCst, Scope::Cta);
}

/// Executes a sequentially consistent fence among the threads of the grid; the same as
/// [`device_fence`].
#[track_caller]
pub fn grid_fence() {
    device_fence();
}

/// Executes a sequentially consistent fence among the threads of the GPU.
#[doc(alias = "__threadfence")]
#[track_caller]
pub fn device_fence() {
    fence(Order::SeqCst, Scope::Gpu);
}

/// Executes a sequentially consistent fence among all GPUs and the host.
#[doc(alias = "__threadfence_system")]
#[track_caller]
pub fn system_fence() {
    fence(Order::SeqCst, Scope::Sys);
}

/// Sleeps for about `nanos` nanoseconds (between zero and twice that, at most a millisecond). PTX:
/// `nanosleep`.
#[track_caller]
pub fn nanosleep(nanos: u32) {
    arch::nanosleep(nanos);
}
