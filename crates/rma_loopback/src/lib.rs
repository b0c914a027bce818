//! GIN between the GPUs of one host, without an RDMA network card.
//!
//! NCCL delegates the PROXY type of GIN (`ncclGin` in kernels) to an *RMA plugin*. This crate is
//! one: a shared library that performs puts, gets and signals between the ranks of one host by CUDA
//! copies, whether the ranks are threads of one process or separate processes. Any program that
//! uses NCCL loads it through environment variables (`devcomm_locate::gin_loopback_environment`
//! lists them for launchers):
//!
//! ```console
//! $ export NCCL_RMA_PLUGIN=/path/to/libdevcomm_rma_loopback.so
//! $ export NCCL_RMA_PLUGIN_REF_COUNT=1 NCCL_GIN_TYPE=2
//! $ export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
//! $ any-program-that-uses-gin
//! ```
//!
//! NCCL's other requirements remain: cuMem, and GPUs of compute capability 7.0 or newer with peer
//! access and `GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`. `NCCL_LSA_TEAM_SIZE` below the number of
//! ranks makes several LSA teams, and so rails, on one host.
//!
//! # How it works
//!
//! Each rank has one *inbound stream*, of the highest priority on its device, for all data and
//! signals into the rank. A rank that puts leaves the operation in the target's queue. The target's
//! progress thread enqueues such operations on the stream after each pass over NCCL's queues: the
//! copies, then in one batch the writes of the signals and of a sequence number in pinned memory.
//! So an operation is complete when the target has the data, and NCCL's test for completion is one
//! load. Within a process copies go from device to device, by the memory's mapping or one that
//! the plugin adds. Between processes they go through shared pinned memory, and the target rank
//! enqueues them in its `rmaProgress`. Operations that cannot be enqueued yet wait in the plugin.
//!
//! # Environment
//!
//! | variable | values, default first | meaning |
//! |---|---|---|
//! | `DEVCOMM_GIN_COPY` | `auto`, `peer`, `mapped`, `staged` | copies between devices (below) |
//! | `DEVCOMM_GIN_SIGNAL` | `auto`, `write` | additions to signals (below) |
//! | `DEVCOMM_GIN_SLOTS` | 16 (2 to 1024) | staging slots per rank, per peer in another process |
//! | `DEVCOMM_GIN_SLOT_KIB` | 512 (4 to 65536) | size of a staging slot, in pinned memory |
//! | `DEVCOMM_GIN_DEPTH` | 256 (1 to 1024) | operations in an inbound stream; later ones wait |
//! | `DEVCOMM_GIN_CONNECTIONS` | 1 (1 to 4) | network devices to report, one connection for each |
//! | `DEVCOMM_GIN_TIMEOUT` | 60 | seconds that a rank waits for the others to connect |
//! | `DEVCOMM_GIN_DEBUG` | unset, 1 | log to standard error; errors are always logged |
//!
//! Copies between devices of one process use mapped memory where possible, else peer copies;
//! `staged` uses host memory, for devices without peer access. The device adds to signals
//! atomically if the driver supports it (CUDA 13.1); with `write` the plugin writes the sum. VA
//! signals (words of windows) over several connections need CUDA 13.1.
//!
//! # Guarantees
//!
//! - Every signal is strong within its connection: a kernel that sees the signal sees all data put
//!   into its rank before it, by any context of that connection and any rank of the same process.
//!   Between two processes the kernel sees the data that the sender put before the signal.
//! - Signals that a kernel resets by moving an offset (all indexed signals of NCCL 2.30.5 and
//!   newer) are exact, also from many ranks at once.
//! - A put is complete when the target has the data, not as soon as its source may be reused. A get
//!   is complete when its data is visible: a flush has nothing to do.
//! - After a failed driver call or the death of a process every rank gets an error: from its calls,
//!   from `queryLastError`, and so from the communicator (`ncclCommGetAsyncError`). Kernels are not
//!   notified: they need an abort flag or timeouts.
//!
//! # Limitations
//!
//! - **VA signals**, before CUDA 13.1: the plugin reads the word, adds on the host and writes. If a
//!   kernel changes the word in between, its change or the signal may be lost.
//! - Speed: the host takes part in every operation. This is a tool for development; use RDMA for
//!   performance.
//! - Ranks of another host, another container's network namespace, or another user are refused or
//!   time out.
//! - A rank must keep its device communicator while ranks of other processes put into the rank:
//!   destroy it after a barrier, as with network cards. Before a rank closes, it executes earlier
//!   requests of others, for up to a second. Before it destroys a context or deregisters memory, it
//!   waits up to 4 seconds for its operations; then it drops pending ones and fails the connection.
//!
//! # Dangers
//!
//! NCCL's progress thread enqueues copies by driver calls while a kernel waits for their data. If
//! the driver then waits for that kernel, both deadlock. Causes: loading a module (hence `EAGER`),
//! `cudaMalloc`, `cudaFree` and `cudaHostRegister`, a device-wide synchronisation,
//! `CUDA_LAUNCH_BLOCKING`, a debugger, compute-sanitizer. A copy within one device (a put to the
//! rank itself, two ranks on a GPU) may need free multiprocessors, which a grid that fills the
//! device does not leave; `staged` copies need none. Allocate before the launch. Reserve
//! two CPU cores per rank: its progress thread polls.
//!
//! A rank that closes frees pinned memory, for which the driver waits until the kernels on the
//! device have ended. After a failure whose copies do not end within a second, that memory is
//! leaked.
//!
//! # Safety model
//!
//! NCCL calls C functions with raw pointers; `entry.rs` states their contract. Ranges are checked
//! against the registered regions, handles of requests and regions are numbers and not pointers,
//! and no panic unwinds into NCCL. The other processes of a connection belong to the same user and
//! are trusted with the shared memory; their requests are checked like all others.

pub mod abi;
mod comm;
pub mod config;
mod connection;
mod context;
#[doc(hidden)]
pub mod driver;
mod endpoint;
mod entry;
mod error;
mod group;
mod inbound;
mod log;
mod peer_mapping;
mod region;
mod remote;
mod request;
#[doc(hidden)]
pub mod setup;
mod staging;
mod stream;
mod tables;
mod transfer;

pub use error::{Error, Result};
pub use tables::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
