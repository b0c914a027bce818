//! Communicators, the NCCL library, and what is created with them: windows, device communicators,
//! collectives.

// The methods of `Communicator`, in the order in which they are documented: identity, creation,
// derived communicators and teams.
mod comm;
mod create;
mod derive;
mod properties;
mod teams;

// Memory that the ranks share.
mod registered_buffer;
mod symmetric_buffer;
mod window;

// Data movement.
mod collectives;
mod one_sided;
mod reduce_op;

// Ends and aborts.
mod abort;
mod end;
mod resource;

// Calls for the rest of this crate and for devcomm-ops.
mod agree;
mod deferred;
mod dispatch;

// Other types, and shared code.
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
