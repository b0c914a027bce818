//! GIN between the GPUs of one host, without an RDMA network card.
//!
//! NCCL delegates the PROXY type of GIN (`ncclGin` in kernels) to an *RMA plugin*. This crate is
//! one: a shared library that performs puts, gets and signals between the ranks of one host by CUDA
//! copies, between threads of one process and between processes. Any program that uses NCCL loads
//! it through environment variables (`devcomm_locate::gin_loopback_environment` lists them for
//! launchers):
//!
//! ```console
//! $ export NCCL_RMA_PLUGIN=/path/to/libdevcomm_rma_loopback.so
//! $ export NCCL_RMA_PLUGIN_REF_COUNT=1 NCCL_GIN_TYPE=2
//! $ export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
//! $ any-program-that-uses-gin
//! ```
//!
//! NCCL's other requirements remain: cuMem, GPUs of compute capability 7.0 with peer access and
//! `GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`. `NCCL_LSA_TEAM_SIZE` below the number of ranks makes
//! several LSA teams, and so rails, on one host.
//!
//! # How it works
//!
//! Each rank has one stream of the highest priority on its device, its *lane*, for everything that
//! goes into the rank. A rank that puts enqueues there, under a lock: the copy, then in one batch
//! the write of the signal and of a sequence number in pinned memory. So an operation is complete
//! when the target has it, and NCCL's test for completion is one load. Within a process copies go
//! from device to device, by the memory's own mapping or one that the plugin adds; between
//! processes through shared pinned memory, where the target's owner executes requests from its own
//! progress calls. Operations that cannot be enqueued yet wait in the plugin, in order.
//!
//! # Environment
//!
//! | variable | values | meaning |
//! |---|---|---|
//! | `DEVCOMM_GIN_COPY` | `auto`, `peer`, `mapped`, `staged` | copies between devices (below) |
//! | `DEVCOMM_GIN_SIGNAL` | `auto`, `write` | additions to signals (below) |
//! | `DEVCOMM_GIN_SLOTS` | 16 | staging slots of a rank, and of each direction of a link |
//! | `DEVCOMM_GIN_SLOT_KIB` | 512 | size of a slot |
//! | `DEVCOMM_GIN_DEPTH` | 256 | operations in a rank's stream; more wait in the plugin |
//! | `DEVCOMM_GIN_CONNECTIONS` | 1 to 4 | devices to report: NCCL makes a connection for each |
//! | `DEVCOMM_GIN_TIMEOUT` | 60 | seconds that a rank waits for the others to connect |
//! | `DEVCOMM_GIN_DEBUG` | 1 | log to standard error; errors are always logged |
//!
//! Copies between devices of one process use mapped memory where possible, else peer copies;
//! `staged` uses host memory, for devices without peer access. The device adds to signals where the
//! driver can (CUDA 13.1); `write` always writes sums. VA signals over several connections need
//! CUDA 13.1.
//!
//! # Guarantees
//!
//! - Every signal is strong within its connection: data put into a rank before it, by any context
//!   of that connection and any rank of the same process, is visible to an observer of the signal;
//!   between two processes, the data that its sender has put before it.
//! - Signals that a kernel resets by moving an offset (all indexed signals of NCCL 2.30.5 and
//!   newer) are exact, also from many ranks at once.
//! - A put is complete when the target has it, not when its source may be reused. A get is complete
//!   when its data is visible: there is nothing left to flush.
//! - A failed driver call or the death of a process is an error of every rank from then on: of the
//!   call, of `queryLastError`, and so of the communicator (`ncclCommGetAsyncError`). Kernels are
//!   not notified: they need an abort flag or timeouts.
//!
//! # Limitations
//!
//! - **Signals to an address** (VA signals) are, before CUDA 13.1, read, added to and written, in
//!   lane order. If a kernel changes the same word meanwhile, its change or the signal may be lost.
//! - Speed: the host takes part in every operation. This is a tool for development; use RDMA for
//!   performance.
//! - Ranks of another host, another container's network namespace, or another user are refused or
//!   time out.
//! - A rank must have a device communicator while ranks of other processes put into it, and all
//!   must have finished (a barrier) before it is destroyed, as with network cards. A rank that
//!   leaves executes earlier requests for up to a second. Its own operations end before their
//!   context and their memory: it waits up to 4 seconds for that, then drops pending ones, and the
//!   connection has failed.
//!
//! # Dangers
//!
//! Copies are driver calls on NCCL's progress thread, while a kernel waits for their data. Anything
//! that makes the driver wait for that kernel then deadlocks: loading a module (hence `EAGER`),
//! `cudaMalloc`, `cudaFree` and `cudaHostRegister`, a device-wide synchronisation,
//! `CUDA_LAUNCH_BLOCKING`, a debugger, compute-sanitizer. A copy within one device (a put to the
//! rank itself, two ranks on a GPU) may need free multiprocessors, which a grid that fills the
//! device does not leave; `DEVCOMM_GIN_COPY=staged` needs none. Allocate before the launch. Reserve
//! two CPU cores per rank: its progress thread polls.
//!
//! # Safety model
//!
//! NCCL calls C functions with raw pointers; their contract is NCCL's interface, stated at the
//! module of the entries. Ranges are checked against the registered regions, requests and regions
//! are numbers and not pointers, and nothing unwinds into NCCL. The other processes of a connection
//! belong to the same user and are trusted with the shared memory; their requests are checked like
//! all others.

pub mod abi;
mod channel;
mod comm;
pub mod config;
mod connection;
mod context;
#[doc(hidden)]
pub mod driver;
mod endpoint;
mod entry;
mod error;
mod lane;
mod log;
mod peer_mapping;
mod region;
mod remote;
mod request;
#[doc(hidden)]
pub mod setup;
mod staging;
mod tables;
mod transfer;

pub use error::{Error, Result};
pub use tables::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
