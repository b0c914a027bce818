//! Tiles: what matrix kernels on Hopper are written with.
//!
//! * [`SharedTile`]: rows of 64 elements in shared memory, swizzled as TMA and `wgmma` expect.
//! * [`Pipeline`]: stages in shared memory that a producer fills and consumers empty.
//! * [`TileMemory`]: the dynamic shared memory where tiles lie.
//! * [`TileOrder`]: the order in which blocks take the tiles of a matrix.
//! * [`Schedule`]: the division of a product among blocks, with tiles split over a cluster.
//!
//! All of it compiles to what one would write by hand with [`tma`](crate::tma),
//! [`mbarrier`](crate::mbarrier) and [`wgmma`](crate::wgmma), and runs in the simulator.

mod order;
mod pipeline;
mod schedule;
mod shared;

pub use self::order::TileOrder;
pub use self::pipeline::{Pipeline, PipelineState};
pub use self::schedule::{Schedule, Work};
pub use self::shared::{SharedTile, TileMemory};
