//! Communicators, the NCCL library, and what is created with them: windows, device communicators,
//! collectives.

// The methods of `Communicator`, in the order in which they are documented. What it is, how it
// begins, and what it is made into.
mod comm;
mod create;
mod derive;
mod properties;
mod teams;

// Memory that the ranks share.
mod registered_buffer;
mod symmetric_buffer;
mod window;

// What moves data.
mod collectives;
mod one_sided;
mod reduce_op;

// How it ends.
mod abort;
mod end;
mod resource;

// What others of this crate and of devcomm's operations need of it.
mod agree;
mod dispatch;

// Other types, and what all of these share.
mod config;
mod dev_comm;
mod group;
mod handle;
mod library;
mod multi_gpu;
mod params;
pub(crate) mod peers;
mod watched;

pub use self::abort::AbortHandle;
#[doc(hidden)]
pub use self::agree::CollectiveCall;
pub use self::collectives::{Configured, SameElement};
pub use self::comm::{Communicator, MemoryStat};
pub use self::config::{
    CollectiveConfig, CommConfig, CtaPolicy, GraphUsageMode, HostCftMode, NvlsHostMode, VendorValue,
};
pub use self::derive::ShrinkMode;
pub use self::dev_comm::{
    Counters, DevCommRequirements, DevCommResource, GinBarriers, LlA2a, LsaBarriers,
    RequirementsRefusal, ResourceBuffer, ResourceKey, ResourceRequest, Signals, TeamMultimem,
};
#[cfg(test)]
pub(crate) use self::end::SUSPEND_MEMORY;
pub use self::group::{Estimate, Group, group, simulate};
pub use self::library::{Library, OLDEST_VERSION, UniqueId, Versions};
pub use self::multi_gpu::MultiGpu;
pub use self::one_sided::{Signal, WaitSignalDesc};
pub use self::params::Params;
pub use self::properties::{GinTypes, Properties};
pub use self::reduce_op::{CustomReduceOp, ReduceOp, ReduceOperator, ReduceScale};
pub use self::registered_buffer::{BorrowedRegistration, RegisteredBuffer};
pub use self::resource::CommResource;
pub use self::symmetric_buffer::SymmetricBuffer;
pub use self::teams::CftTeamMode;
pub use self::window::{LogicalEndpoint, Window, WindowFlags};
