//! Why a launch was refused.

use devcomm_locate::NcclVersion;
use devcomm_types::{Dim3, GinType, Unmet};

use super::AbortCause;

/// Why a launch was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchRefusal {
    /// A dimension of the grid or of the block is 0.
    #[error(
        "a grid of {grid} blocks of {block} threads has nothing to run; set both by `grid` and \
         `block`"
    )]
    Empty {
        /// Blocks.
        grid: Dim3,
        /// Threads per block.
        block: Dim3,
    },
    /// A dimension of the grid exceeds the device's limit.
    #[error("a grid of {grid} is over the GPU's limit of {}x{}x{}", limit[0], limit[1], limit[2])]
    GridTooLarge {
        /// Blocks.
        grid: Dim3,
        /// The device's limit.
        limit: [u32; 3],
    },
    /// The grid has 2^32 threads or more, which kernels number by 32 bits.
    #[error("a grid of {grid} blocks of {block} threads has 2^32 threads or more")]
    TooManyThreadsInGrid {
        /// Blocks.
        grid: Dim3,
        /// Threads per block.
        block: Dim3,
    },
    /// A dimension of the block exceeds the device's limit.
    #[error("a block of {block} is over the GPU's limit of {}x{}x{}", limit[0], limit[1], limit[2])]
    BlockTooLarge {
        /// Threads per block.
        block: Dim3,
        /// The device's limit.
        limit: [u32; 3],
    },
    /// The block has more threads than the kernel can be launched with.
    #[error("{threads} threads per block, but this kernel allows at most {limit}")]
    TooManyThreads {
        /// Threads per block.
        threads: u64,
        /// The kernel's limit.
        limit: u32,
    },
    /// The block needs more registers than a block can have.
    #[error(
        "{registers} registers x {threads} threads need {needed} registers (allocated in multiples \
         of 8 per thread, for whole warps), but a block has {limit}; use at most {} threads",
        largest_block(*registers, *limit)
    )]
    TooManyRegisters {
        /// Registers per thread.
        registers: u32,
        /// Threads per block.
        threads: u64,
        /// Registers that the block needs.
        needed: u64,
        /// The device's limit.
        limit: u32,
    },
    /// The block needs more shared memory than a block can have.
    #[error(
        "{static_shared} B static and {dynamic_shared} B dynamic shared memory, but a block has \
         {limit} B"
    )]
    TooMuchShared {
        /// Static shared memory in bytes.
        static_shared: u32,
        /// Dynamic shared memory in bytes.
        dynamic_shared: u32,
        /// The device's limit in bytes.
        limit: u32,
    },
    /// The GPU has no clusters or dependent launches.
    #[error(
        "{what} needs a GPU of compute capability 9.0, but this one's is {}.{}",
        compute_capability.0, compute_capability.1
    )]
    AttributeUnsupported {
        /// The requested attribute.
        what: &'static str,
        /// The device's compute capability.
        compute_capability: (u32, u32),
    },
    /// No cluster can have this many blocks.
    #[error("clusters of {blocks} blocks, but a cluster has 1 to {limit}")]
    ClusterSize {
        /// Blocks per cluster.
        blocks: u32,
        /// The largest cluster.
        limit: u32,
    },
    /// The kernel's clusters have another size.
    #[error("clusters of {blocks} blocks, but the kernel fixes its clusters at {fixed}")]
    OtherCluster {
        /// Blocks per cluster in the launch.
        blocks: u32,
        /// Blocks per cluster that the kernel fixes.
        fixed: Dim3,
    },
    /// The grid is not a multiple of the cluster.
    #[error("a grid of {grid} blocks is not a multiple of its clusters of {cluster}")]
    PartialCluster {
        /// Blocks.
        grid: Dim3,
        /// Blocks per cluster.
        cluster: Dim3,
    },
    /// A kernel that communicates was launched with a multidimensional grid or block.
    #[error(
        "its grid is {grid} and its block {block}, but of a kernel that takes a DevComm both have \
         one dimension"
    )]
    NotOneDimensional {
        /// Blocks of the grid.
        grid: Dim3,
        /// Threads per block.
        block: Dim3,
    },
    /// The kernel takes a device communicator but none was passed.
    #[error("it takes a DevComm, but none is among the arguments")]
    NoDevComm,
    /// The device communicator was not made by NCCL.
    #[error("the DevComm was not filled in by ncclDevCommCreate")]
    ForeignDevComm,
    /// The device communicator has a different layout than the kernel reads.
    #[error(
        "the kernel reads the DevComm of NCCL {kernel}, but this one has the layout of NCCL \
         {dev_comm}"
    )]
    DevCommVersion {
        /// The version of the kernel's device code.
        kernel: NcclVersion,
        /// The version of the device communicator.
        dev_comm: NcclVersion,
    },
    /// A GIN kernel was given a device communicator without GIN.
    #[error(
        "it is a kernel for GIN, but the device communicator was made without GIN; ask for a \
         connection with DevCommRequirements::gin_connection"
    )]
    NoGin,
    /// The compiled kernel has no entry for the device communicator's GIN back end.
    #[error(
        "it has entries for {}, but the device communicator's back end is {dev_comm}; rebuild the \
         kernels, or ask for another back end with DevCommRequirements::gin_type",
        back_ends(entries)
    )]
    NoGinEntry {
        /// The back ends that the compiled kernel has entries for.
        entries: Vec<GinType>,
        /// The device communicator's back end.
        dev_comm: GinType,
    },
    /// The device communicator's connections use several back ends, but each entry is for one.
    #[error(
        "each of its entries is for one back end of GIN, but the device communicator's connections \
         use several ({}); ask for one with DevCommRequirements::gin_type",
        back_ends(connections)
    )]
    MixedGin {
        /// The back end of each connection.
        connections: Vec<GinType>,
    },
    /// Grid, block or arguments do not meet a `requires` condition of the kernel.
    #[error("it requires {unmet}")]
    Requirement {
        /// The condition, with the values of both sides.
        unmet: Unmet,
    },
    /// A safe kernel was given windows and device communicators of several communicators.
    #[error(
        "its windows and its device communicator are not all of one communicator, so that a safe \
         kernel could write out of bounds"
    )]
    MixedCommunicators,
    /// A safe kernel was launched with several device communicators.
    #[error(
        "its arguments have several device communicators, of which a launch checks the barriers, \
         GIN back end and version of the first one only"
    )]
    SeveralDevComms,
    /// A safe kernel was launched in another context than that of its arguments' communicator.
    #[error(
        "its windows and its device communicator are of a communicator of another context than the \
         stream's, which would not keep them until the kernel has ended"
    )]
    OtherContext,
    /// A safe kernel was given a window whose length on other ranks is not known.
    #[error(
        "the length that a window among its arguments has on every rank is not known, so that a \
         safe kernel could write out of bounds; use windows of a world's communicator, or launch \
         it by `into_unsafe`"
    )]
    UncheckedWindow,
    /// A safe kernel was given the same memory in two windows.
    #[error(
        "two windows among its arguments share memory, so that a rank could write what another \
         rank still reads; use windows of different memory, or declare a kernel that allows this \
         `#[kernel(in_place)]`"
    )]
    OverlappingWindows,
    /// An argument is closed, or the group that creates it has not ended yet.
    #[error("{what} among its arguments is closed, or its group has not ended yet")]
    Closed {
        /// Which argument.
        what: &'static str,
    },
    /// The communicator of an argument is suspended or revoked, or has ended.
    #[error("the communicator of its arguments is {how}")]
    CommunicatorEnded {
        /// The state: suspended, revoked, finalized, destroyed or aborted.
        how: &'static str,
    },
    /// The device communicator was aborted.
    #[error(
        "the device communicator of rank {rank} among its arguments was aborted ({cause}), and its \
         barriers are in an unknown state; close it and make another"
    )]
    Aborted {
        /// The rank.
        rank: usize,
        /// Why it was aborted.
        cause: AbortCause,
    },
    /// The grid has more blocks than the device communicator has LSA barriers.
    #[error(
        "{blocks} blocks, but the device communicator has {barriers} LSA barriers; ask for \
         DevCommRequirements::lsa_barriers({blocks}) or launch fewer blocks"
    )]
    TooFewBarriers {
        /// Blocks.
        blocks: u64,
        /// LSA barriers of the device communicator.
        barriers: u64,
    },
    /// The blocks cannot all be resident at once: those that run would wait forever for the others.
    #[error(
        "{blocks} blocks would not all run at once, as blocks that wait for each other must: the \
         GPU holds {resident} ({per_multiprocessor} on each of {multiprocessors} multiprocessors)"
    )]
    NotResident {
        /// Blocks.
        blocks: u64,
        /// Blocks that fit on the GPU.
        resident: u64,
        /// Blocks that fit on one multiprocessor.
        per_multiprocessor: u32,
        /// Multiprocessors of the GPU.
        multiprocessors: u32,
    },
    /// The host and the compiled kernel disagree on the parameters.
    #[error(
        "the compiled kernel takes {compiled}, but the program passes {passed}; rebuild the kernels"
    )]
    Parameters {
        /// The parameters of the compiled kernel, from its description.
        compiled: String,
        /// The arguments that the launch passes.
        passed: String,
    },
}

fn back_ends(list: &[GinType]) -> String {
    list.iter().map(GinType::to_string).collect::<Vec<_>>().join(", ")
}

/// Registers per thread are rounded up to a multiple of this.
const REGISTER_UNIT: u64 = 8;
const WARP: u64 = 32;

pub(crate) fn registers_needed(registers: u32, threads: u64) -> u64 {
    u64::from(registers).next_multiple_of(REGISTER_UNIT) * threads.next_multiple_of(WARP)
}

fn largest_block(registers: u32, limit: u32) -> u64 {
    // `max`: anyone may make this error with 0 registers, and print it.
    let per_warp = registers_needed(registers.max(1), WARP);
    u64::from(limit) / per_warp * WARP
}
