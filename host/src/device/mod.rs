//! A rank's GPU: its context, streams, events, graphs and memory, and its kernels and their
//! launches.

pub(crate) mod abort;
mod capture;
mod context;
mod copy;
mod dlpack;
mod drops;
mod enqueues;
mod event;
mod foreign;
mod graph;
mod health;
mod holds;
mod idle;
pub(crate) mod in_group;
pub(crate) mod issuer;
mod kernels;
mod launch;
mod lifecycle;
mod memory;
mod operations;
mod order;
mod other_libraries;
mod pinned;
pub(crate) mod recorder;
mod scope;
mod slice;
mod stream;

pub use self::abort::KernelAbortHandle;
pub(crate) use self::context::gpus_of;
pub use self::context::{Context, visible_gpus};
pub(crate) use self::drops::PostponedDrops;
pub use self::event::Event;
pub use self::graph::Graph;
pub(crate) use self::health::Health;
pub(crate) use self::holds::CreationTime;
pub(crate) use self::issuer::KeepAlive;
pub use self::kernels::{
    KernelSet, Kernels, KernelsOn, ModuleSource, ParamInfo, RawArg, WITHOUT_PTX,
};
pub use self::launch::{DeviceLimits, FunctionInfo};
pub(crate) use self::lifecycle::Lifecycle;
pub use self::memory::DeviceBuffer;
pub use self::order::{StreamOrder, Turn};
pub use self::pinned::PinnedBuffer;
pub use self::scope::{Scope, ScopeThread};
pub use self::slice::{Buffer, DeviceSlice, Dynamic};
pub use self::stream::{OnStream, Stream};
