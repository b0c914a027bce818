//! GIN on a host without any RDMA network card.
//!
//! NCCL relays the PROXY type of GIN (`ncclGin` in kernels) through an *RMA plugin*. This crate is
//! one: a shared library that carries puts, gets and signals between the ranks of one host by CUDA
//! copies, between threads of one process and between processes. Any program that uses NCCL gets it
//! by its environment alone (`devcomm_locate::gin_loopback_environment` lists the same for
//! launchers):
//!
//! ```console
//! $ export NCCL_RMA_PLUGIN=/path/to/libdevcomm_rma_loopback.so NCCL_RMA_PLUGIN_REF_COUNT=1 NCCL_GIN_TYPE=2
//! $ export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32
//! $ any-program-that-uses-gin
//! ```
//!
//! What NCCL asks of the host remains: cuMem, GPUs of compute capability 7.0 that reach each other,
//! with `GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`. `NCCL_LSA_TEAM_SIZE` below the number of ranks
//! makes several LSA teams, and so rails, on one host.
//!
//! # How it works
//!
//! Each rank has one stream of the highest priority on its device, its *lane*, which carries all
//! that goes into the rank. Whoever puts enqueues there, under a lock: the copy, then in one batch
//! the write of the signal and of a sequence number in pinned memory. So an operation is complete
//! when the target has it, and NCCL's question whether it is costs one load. Within a process
//! copies go from device to device, by the memory's own mapping or one that the plugin adds;
//! between processes through pinned memory that both share, where the target's owner carries out
//! what is asked, from its own progress calls. What cannot go on the stream yet waits in the
//! plugin, in order.
//!
//! # Environment
//!
//! | variable | values | meaning |
//! |---|---|---|
//! | `DEVCOMM_GIN_COPY` | `auto`, `peer`, `mapped`, `staged` | how data goes between devices of one process: mapped where it can be, else by peer copies; `staged`: through host memory, for devices that do not reach each other |
//! | `DEVCOMM_GIN_SIGNAL` | `auto`, `write` | how signals are added to: by the device where the driver can (CUDA 13.1), or by writing sums always |
//! | `DEVCOMM_GIN_SLOTS` | 16 | staging slots of a rank, and of each direction between two processes |
//! | `DEVCOMM_GIN_SLOT_KIB` | 512 | size of a slot |
//! | `DEVCOMM_GIN_DEPTH` | 256 | operations on one rank's stream at a time; more wait in the plugin |
//! | `DEVCOMM_GIN_CONNECTIONS` | 1 to 4 | devices to offer: NCCL makes a connection for each; signals to an address then need CUDA 13.1 |
//! | `DEVCOMM_GIN_TIMEOUT` | 60 | seconds that a rank waits for the others to connect |
//! | `DEVCOMM_GIN_DEBUG` | 1 | say on standard error what goes on; errors are always said |
//!
//! # What is promised
//!
//! - Every signal is a strong one of its connection: what was put into a rank before it, by
//!   whatever context of that connection and rank of the same process, is visible to who sees it;
//!   between two processes, what its sender has put before it.
//! - Signals that a kernel resets by moving an offset (all indexed signals of NCCL 2.30.5 and
//!   newer) are exact, from many ranks at a time.
//! - A put is complete when the target has it, not just when its source may be reused. A get is
//!   complete when its data is visible: there is nothing left to flush.
//! - A call of the driver that fails, or a process that dies, is an error of every rank from then
//!   on: of the call, of `queryLastError`, and so of the communicator (`ncclCommGetAsyncError`).
//!   Kernels do not hear of that by themselves: they need an abort flag or timeouts.
//!
//! # What is not
//!
//! - **Signals to an address** (VA signals) are, before CUDA 13.1, read, added to and written, in
//!   the order of the lane. A kernel that changes the same word meanwhile may lose its change, or
//!   the signal.
//! - Speed: the host is on the way of every operation. It is a tool to develop with; use RDMA where
//!   it counts.
//! - Ranks of another host, another container's network namespace, or another user are refused, or
//!   not found in time.
//! - A rank must have a device communicator while others of another process put into it, and all
//!   must have finished (a barrier) before it is destroyed, as with network cards. A rank that
//!   leaves carries out for up to a second what it had been asked for. Its own operations end
//!   before their context and their memory: for that it waits up to 4 seconds, then drops what
//!   waits, and the connection has failed.
//!
//! # Dangers
//!
//! Copies are calls of the driver on NCCL's progress thread, while a kernel waits for what they
//! bring. What makes the driver wait for that kernel then stops everything: loading a module (hence
//! `EAGER`), `cudaMalloc`, `cudaFree` and `cudaHostRegister`, a device-wide synchronisation,
//! `CUDA_LAUNCH_BLOCKING`, a debugger, compute-sanitizer. A copy within one device (a put to the
//! rank itself, two ranks on a GPU) may need room on its multiprocessors, which a grid that fills
//! the device does not leave; `DEVCOMM_GIN_COPY=staged` needs none. Allocate before the launch.
//! Keep two CPU cores for each rank: its progress thread polls.
//!
//! # Safety model
//!
//! NCCL calls plain functions with plain pointers; what holds of those is the contract of its
//! interface, stated at the module of the entries. Ranges are checked against the registered
//! regions, requests and regions are numbers and not pointers, and nothing unwinds into NCCL. The
//! other processes of a connection are this user's, and trusted as far as their memory goes; what
//! they ask for is checked like the rest.

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
mod tables;
mod transfer;

pub use error::{Error, Result};
pub use tables::{ncclRmaPlugin_v14, ncclRmaPlugin_v15, ncclRmaPlugin_v16};
