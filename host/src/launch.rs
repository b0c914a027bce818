//! The shape of a launch, and whether the GPU and the kernel allow it.
//!
//! A launch that would hang or corrupt memory is refused before the driver sees it. The verdict is a pure function of
//! numbers, so that it is tested without a GPU.

use devcomm_locate::NcclVersion;
use devcomm_types::{DevComm, GinType};

use crate::abort::AbortCause;
use crate::dev_comm::is_filled;

/// Three extents. A number is the first of them, the others being 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "CUDA's names")]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim3 {
    /// The product of the extents.
    #[must_use]
    pub const fn count(self) -> u64 {
        // The driver's limits keep this far from overflow; a wild value must not wrap to a small one.
        (self.x as u64).saturating_mul(self.y as u64).saturating_mul(self.z as u64)
    }

    pub(crate) const fn to_array(self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }
}

impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Self { x, y, z: 1 }
    }
}

impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Self { x, y, z }
    }
}

impl std::fmt::Display for Dim3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.y, self.z) {
            (1, 1) => write!(f, "{}", self.x),
            _ => write!(f, "{}x{}x{}", self.x, self.y, self.z),
        }
    }
}

/// How many blocks of how many threads, and how much dynamic shared memory a block.
///
/// ```
/// use devcomm_host::LaunchConfig;
/// let config = LaunchConfig::new(64, 512).with_dynamic_shared(16 << 10);
/// assert_eq!((config.grid.x, config.block.count()), (64, 512));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: Dim3,
    /// Threads a block.
    pub block: Dim3,
    /// Dynamic shared memory a block, in bytes.
    pub dynamic_shared: u32,
}

impl LaunchConfig {
    /// Without dynamic shared memory.
    #[must_use]
    pub fn new(grid: impl Into<Dim3>, block: impl Into<Dim3>) -> Self {
        Self { grid: grid.into(), block: block.into(), dynamic_shared: 0 }
    }

    /// With that much dynamic shared memory a block, in bytes.
    #[must_use]
    pub const fn with_dynamic_shared(mut self, bytes: u32) -> Self {
        self.dynamic_shared = bytes;
        self
    }
}

/// What a GPU allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the driver's attributes of these names")]
pub struct DeviceLimits {
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
    pub max_grid: [u32; 3],
    pub max_block: [u32; 3],
    pub max_threads_per_block: u32,
    pub registers_per_block: u32,
    /// Shared memory a block without asking, in bytes.
    pub shared_per_block: u32,
    /// Shared memory a block that asks for more, in bytes.
    pub shared_per_block_optin: u32,
}

/// What a kernel uses, as the driver compiled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Registers a thread.
    pub registers: u32,
    /// The largest block that the driver would launch.
    pub max_threads_per_block: u32,
    /// Static shared memory a block, in bytes.
    pub static_shared: u32,
    /// Local memory a thread (stack and spills), in bytes.
    pub local: u32,
}

impl FunctionInfo {
    /// What is enough for either.
    pub(crate) fn most(self, other: Self) -> Self {
        Self {
            registers: self.registers.max(other.registers),
            max_threads_per_block: self.max_threads_per_block.min(other.max_threads_per_block),
            static_shared: self.static_shared.max(other.static_shared),
            local: self.local.max(other.local),
        }
    }
}

/// Why a launch was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchRefusal {
    /// An extent is 0.
    #[error("a grid of {grid} blocks of {block} threads has nothing to run")]
    Empty {
        /// Blocks.
        grid: Dim3,
        /// Threads a block.
        block: Dim3,
    },
    /// An extent of the grid is over the device's limit.
    #[error("a grid of {grid} is over the GPU's limit of {}x{}x{}", limit[0], limit[1], limit[2])]
    GridTooLarge {
        /// Blocks.
        grid: Dim3,
        /// The device's limit.
        limit: [u32; 3],
    },
    /// An extent of the block is over the device's limit.
    #[error("a block of {block} is over the GPU's limit of {}x{}x{}", limit[0], limit[1], limit[2])]
    BlockTooLarge {
        /// Threads a block.
        block: Dim3,
        /// The device's limit.
        limit: [u32; 3],
    },
    /// The block has more threads than the kernel can be launched with.
    #[error("{threads} threads a block, but this kernel takes at most {limit}")]
    TooManyThreads {
        /// Threads a block.
        threads: u64,
        /// The kernel's limit.
        limit: u32,
    },
    /// The block needs more registers than a block can have.
    #[error(
        "{registers} registers x {threads} threads need {needed} registers (allocated in steps of 8 a thread and whole warps), but a block has {limit}; use at most {} threads",
        largest_block(*registers, *limit)
    )]
    TooManyRegisters {
        /// Registers a thread.
        registers: u32,
        /// Threads a block.
        threads: u64,
        /// Registers that a block would take.
        needed: u64,
        /// The device's limit.
        limit: u32,
    },
    /// The block needs more shared memory than a block can have.
    #[error(
        "{static_shared} B static and {dynamic_shared} B dynamic shared memory, but a block has {limit} B"
    )]
    TooMuchShared {
        /// Static shared memory in bytes.
        static_shared: u32,
        /// Dynamic shared memory in bytes.
        dynamic_shared: u32,
        /// The device's limit in bytes.
        limit: u32,
    },
    /// A kernel that communicates was given a block of several dimensions.
    #[error(
        "its block is {block}, but a kernel that takes a DevComm runs in one-dimensional blocks"
    )]
    BlockNotOneDimensional {
        /// Threads a block.
        block: Dim3,
    },
    /// The kernel takes a device communicator but none was passed.
    #[error("it takes a DevComm, but none is among the arguments")]
    NoDevComm,
    /// The device communicator was not made by NCCL.
    #[error("the DevComm was not filled in by ncclDevCommCreate")]
    ForeignDevComm,
    /// The device communicator has another layout than the kernel reads.
    #[error(
        "the kernel reads the DevComm of NCCL {kernel}, but this one has the layout of NCCL {dev_comm}"
    )]
    DevCommVersion {
        /// The version of the kernel's device code.
        kernel: NcclVersion,
        /// The version of the device communicator.
        dev_comm: NcclVersion,
    },
    /// A kernel for GIN was given a device communicator without GIN.
    #[error(
        "it is a kernel for GIN, but the device communicator was made without GIN; ask for a connection with DevCommRequirements::gin_connection"
    )]
    NoGin,
    /// The compiled kernel has no entry for the device communicator's back end.
    #[error(
        "it has entries for {}, but the device communicator's back end is {dev_comm}; rebuild the kernels, or ask for another back end with DevCommRequirements::gin_type",
        back_ends(entries)
    )]
    NoGinEntry {
        /// The back ends that the compiled kernel has entries for.
        entries: Vec<GinType>,
        /// The device communicator's.
        dev_comm: GinType,
    },
    /// The device communicator's connections are of several back ends, and an entry knows one.
    #[error(
        "each of its entries is for one back end of GIN, but the device communicator's connections use several ({}); ask for one with DevCommRequirements::gin_type",
        back_ends(connections)
    )]
    MixedGin {
        /// The back end of each connection.
        connections: Vec<GinType>,
    },
    /// What stands behind an argument is gone, or not there yet.
    #[error("{what} among its arguments is closed, or its group has not ended yet")]
    Closed {
        /// Which argument.
        what: &'static str,
    },
    /// The device communicator was aborted.
    #[error(
        "the device communicator of rank {rank} among its arguments was aborted ({cause}), and its barriers may stand anywhere; close it and make another"
    )]
    Aborted {
        /// The rank.
        rank: usize,
        /// Why it was aborted.
        cause: AbortCause,
    },
    /// The grid has more blocks than barriers were reserved.
    #[error(
        "{blocks} blocks, but the device communicator has {barriers} LSA barriers; ask for DevCommRequirements::lsa_barriers({blocks}) or launch fewer blocks"
    )]
    TooFewBarriers {
        /// Blocks.
        blocks: u64,
        /// Barriers of the device communicator.
        barriers: u64,
    },
    /// The blocks cannot all run at once, so that those that run would wait for ever.
    #[error(
        "{blocks} blocks would not all run at once, as blocks that wait for each other must: the GPU holds {resident} ({per_multiprocessor} on each of {multiprocessors} multiprocessors)"
    )]
    NotResident {
        /// Blocks.
        blocks: u64,
        /// Blocks that fit.
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
        /// What the sidecar says.
        compiled: String,
        /// What the launch passes.
        passed: String,
    },
}

fn back_ends(list: &[GinType]) -> String {
    list.iter().map(GinType::to_string).collect::<Vec<_>>().join(", ")
}

/// Registers are allocated in steps of this a thread.
const REGISTER_STEP: u64 = 8;
const WARP: u64 = 32;

fn registers_needed(registers: u32, threads: u64) -> u64 {
    u64::from(registers).next_multiple_of(REGISTER_STEP) * threads.next_multiple_of(WARP)
}

fn largest_block(registers: u32, limit: u32) -> u64 {
    let per_warp = registers_needed(registers.max(1), WARP);
    u64::from(limit) / per_warp * WARP
}

/// Whether this kernel can be launched so on this GPU.
pub(crate) fn check_shape(
    config: &LaunchConfig,
    function: &FunctionInfo,
    device: &DeviceLimits,
) -> Result<(), LaunchRefusal> {
    let (grid, block) = (config.grid, config.block);
    if grid.count() == 0 || block.count() == 0 {
        return Err(LaunchRefusal::Empty { grid, block });
    }
    let over = |extents: Dim3, limit: [u32; 3]| {
        extents.to_array().iter().zip(limit).any(|(extent, limit)| *extent > limit)
    };
    if over(grid, device.max_grid) {
        return Err(LaunchRefusal::GridTooLarge { grid, limit: device.max_grid });
    }
    if over(block, device.max_block) {
        return Err(LaunchRefusal::BlockTooLarge { block, limit: device.max_block });
    }
    let threads = block.count();
    if threads > u64::from(device.max_threads_per_block) {
        return Err(LaunchRefusal::TooManyThreads { threads, limit: device.max_threads_per_block });
    }
    // Before the kernel's own limit, which follows from its registers and would not say so.
    let needed = registers_needed(function.registers, threads);
    if needed > u64::from(device.registers_per_block) {
        let (registers, limit) = (function.registers, device.registers_per_block);
        return Err(LaunchRefusal::TooManyRegisters { registers, threads, needed, limit });
    }
    if threads > u64::from(function.max_threads_per_block) {
        let limit = function.max_threads_per_block;
        return Err(LaunchRefusal::TooManyThreads { threads, limit });
    }
    let (static_shared, dynamic_shared) = (function.static_shared, config.dynamic_shared);
    let limit = device.shared_per_block_optin;
    if u64::from(static_shared) + u64::from(dynamic_shared) > u64::from(limit) {
        return Err(LaunchRefusal::TooMuchShared { static_shared, dynamic_shared, limit });
    }
    Ok(())
}

/// What a launch gives to a kernel that communicates: a device communicator that NCCL made.
pub(crate) fn check_dev_comm(dev_comm: Option<&DevComm>) -> Result<&DevComm, LaunchRefusal> {
    match dev_comm {
        None => Err(LaunchRefusal::NoDevComm),
        Some(dev_comm) if !is_filled(dev_comm) => Err(LaunchRefusal::ForeignDevComm),
        Some(dev_comm) => Ok(dev_comm),
    }
}

/// The back end of all of the device communicator's connections.
pub(crate) fn check_gin(dev_comm: &DevComm) -> Result<GinType, LaunchRefusal> {
    let types = dev_comm.gin_net_device_types.iter();
    let connections = types.take(usize::from(dev_comm.gin_connection_count));
    let connections: Vec<_> = connections.map(|&raw| GinType::from_raw(raw.into())).collect();
    match connections[..] {
        [] => Err(LaunchRefusal::NoGin),
        [first, ref rest @ ..] if rest.iter().any(|other| *other != first) => {
            Err(LaunchRefusal::MixedGin { connections })
        }
        [back_end, ..] => Ok(back_end),
    }
}

/// Whether a kernel that takes this device communicator can be launched so; `per_multiprocessor` is its occupancy, and
/// `stamp` the version of NCCL's device code in it. `lsa_barriers` says whether the kernel opens sessions on LSA barriers: its own,
/// or those that are the inner part of hybrid ones.
pub(crate) fn check_communicating(
    config: &LaunchConfig,
    dev_comm: &DevComm,
    lsa_barriers: bool,
    stamp: Option<NcclVersion>,
    device: &DeviceLimits,
    per_multiprocessor: u32,
) -> Result<(), LaunchRefusal> {
    let layout = NcclVersion::from_code(dev_comm.version);
    if let Some(kernel) = stamp.filter(|kernel| *kernel != layout) {
        return Err(LaunchRefusal::DevCommVersion { kernel, dev_comm: layout });
    }
    let block = config.block;
    if (block.y, block.z) != (1, 1) {
        return Err(LaunchRefusal::BlockNotOneDimensional { block });
    }
    let blocks = config.grid.count();
    let most = dev_comm.lsa_barrier.n_barriers.max(dev_comm.hybrid_lsa_barrier.n_barriers);
    let barriers = u64::try_from(most).unwrap_or(0);
    if lsa_barriers && blocks > barriers {
        return Err(LaunchRefusal::TooFewBarriers { blocks, barriers });
    }
    let multiprocessors = device.multiprocessors;
    let resident = u64::from(multiprocessors) * u64::from(per_multiprocessor);
    if blocks > resident {
        return Err(LaunchRefusal::NotResident {
            blocks,
            resident,
            per_multiprocessor,
            multiprocessors,
        });
    }
    Ok(())
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
