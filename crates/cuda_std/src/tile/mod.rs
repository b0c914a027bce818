//! Tiles: the building blocks of matrix kernels.
//!
//! * [`SharedTile`]: rows of 128 bytes in shared memory, swizzled as TMA and `wgmma` expect.
//! * [`RegTile`]: a tile in the registers of a warp, as products leave it: mapped, combined, and
//!   reduced over its rows and columns.
//! * [`Pipeline`]: stages in shared memory that a producer fills and consumers empty.
//! * [`Mainloop`]: the main loop of a product on Hopper, with the roles of its warps.
//! * [`LastRows`]: the stores of a tile while the next one is multiplied.
//! * [`TileMemory`]: the dynamic shared memory where tiles lie, and [`arena!`](crate::arena) to
//!   divide it.
//! * [`MmaProduct`]: a block's product on every GPU since Ampere, from [`MmaTile`]s that its
//!   threads copy.
//! * [`TileOrder`]: the order in which blocks take the tiles of a matrix.
//! * [`Schedule`]: the division of a product among blocks, with tiles split over a cluster.
//!
//! [`SharedTile`], [`Pipeline`], [`Mainloop`] and [`LastRows`] need Hopper, the others sm_80. All
//! of it compiles to the same code as if written by hand with [`tma`](crate::tma),
//! [`mbarrier`](crate::mbarrier), [`wgmma`](crate::wgmma), [`mma`](crate::mma) and
//! [`async_copy`](crate::async_copy), and runs in the simulator.

#[doc(hidden)]
pub mod arena;
mod last_rows;
mod mainloop;
mod mma;
mod order;
mod persistent;
mod pipeline;
mod register_split;
mod registers;
mod schedule;
mod shared;
mod warpgroup;

pub use self::last_rows::{LastRows, StoresRows, store_rows};
pub use self::mainloop::{EmptyStage, IdleWarp, MAX_STAGES, Mainloop, WorkOf};
pub use self::mma::{Matrix, MmaProduct, MmaTile};
pub use self::order::TileOrder;
pub use self::persistent::{Persistent, Scheduler, Turn};
pub use self::pipeline::{Pipeline, PipelineState};
pub use self::register_split::{RegisterSplit, Registers};
pub use self::registers::{RegColumns, RegPairs, RegRows, RegTile};
pub use self::schedule::{Schedule, Work};
pub use self::shared::{SharedTile, TileMemory};
pub use self::warpgroup::Warpgroup;
