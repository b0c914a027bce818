//! GIN on a host without any RDMA network card.
//!
//! NCCL relays GIN PROXY (`ncclGin*` in kernels) through an *RMA plugin*. This crate is one: a shared library that moves puts, gets and
//! signals between the ranks of one host by CUDA copies.
//!
//! ```console
//! $ export NCCL_RMA_PLUGIN=/path/to/libdevcomm_rma_loopback.so NCCL_RMA_PLUGIN_REF_COUNT=1 NCCL_GIN_TYPE=2
//! $ export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
//! $ any-program-that-uses-gin
//! ```

pub mod abi;
mod channel;
mod comm;
pub mod config;
mod context;
#[doc(hidden)]
pub mod driver;
mod endpoint;
mod entry;
mod error;
mod group;
mod lane;
mod log;
mod reach;
mod region;
mod remote;
mod request;
#[doc(hidden)]
pub mod setup;
mod staging;
mod transfer;

pub use entry::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
pub use error::{Error, Result};

use std::path::Path;

/// The variables that a program must have in its environment before it loads NCCL or touches a GPU, for GIN PROXY through the plugin
/// at `plugin` (an absolute path of this crate's shared library).
///
/// - `NCCL_RMA_PLUGIN` names the plugin, `NCCL_GIN_TYPE=2` asks for GIN PROXY, the only type that goes through a plugin.
/// - `NCCL_RMA_PLUGIN_REF_COUNT=1`: the library stays loaded after the last communicator.
/// - `CUDA_MODULE_LOADING=EAGER`: a module that is loaded while a kernel waits for a signal would wait for that kernel.
/// - `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the usual 8 hardware queues a copy may be queued behind a waiting kernel.
#[must_use]
pub fn environment(plugin: &Path) -> [(&'static str, String); 5] {
    [
        ("NCCL_RMA_PLUGIN", plugin.display().to_string()),
        ("NCCL_RMA_PLUGIN_REF_COUNT", "1".to_owned()),
        ("NCCL_GIN_TYPE", "2".to_owned()),
        ("CUDA_MODULE_LOADING", "EAGER".to_owned()),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32".to_owned()),
    ]
}
