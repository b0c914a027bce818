//! Workloads: kernels with their memory, for the comparisons with NCCL and with C++.

mod all_reduce;
mod barrier;
mod ll_exchange;
mod put;
mod workload;

pub use all_reduce::{AllReduce, KernelInfo};
pub use barrier::Barrier;
pub use ll_exchange::LlExchange;
pub use put::{Message, Put, gin_requirements};
pub use workload::Workload;
