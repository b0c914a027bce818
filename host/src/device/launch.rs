//! Checks of a launch against the limits of the GPU and of the kernel.
//!
//! A launch that would hang or corrupt memory is refused before the driver sees it. The checks are
//! pure functions of numbers, so that they are tested without a GPU.

use devcomm_locate::NcclVersion;
use devcomm_sys::nccl::API_MAGIC;
use devcomm_types::{ArgInfo, DevComm, Dim3, GinType, LaunchConfig};

use crate::error::{LaunchRefusal, registers_needed};

/// What a GPU allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the driver's attributes of these names")]
pub struct DeviceLimits {
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
    pub max_grid: [u32; 3],
    pub max_block: [u32; 3],
    pub max_threads_per_block: u32,
    pub max_threads_per_multiprocessor: u32,
    pub registers_per_block: u32,
    /// Shared memory per block without opt-in, in bytes.
    pub shared_per_block: u32,
    /// Shared memory per block with opt-in, in bytes.
    pub shared_per_block_optin: u32,
}

/// What a kernel uses, as the driver compiled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Registers per thread.
    pub registers: u32,
    /// The largest block that the driver would launch.
    pub max_threads_per_block: u32,
    /// Static shared memory per block, in bytes.
    pub static_shared: u32,
    /// Local memory per thread (stack and spills), in bytes.
    pub local: u32,
    /// Blocks per cluster, if the kernel fixes them.
    pub cluster: Option<Dim3>,
}

impl FunctionInfo {
    /// Returns resources that are enough for both functions.
    pub(crate) fn most(self, other: Self) -> Self {
        Self {
            registers: self.registers.max(other.registers),
            max_threads_per_block: self.max_threads_per_block.min(other.max_threads_per_block),
            static_shared: self.static_shared.max(other.static_shared),
            local: self.local.max(other.local),
            cluster: self.cluster.or(other.cluster),
        }
    }
}

/// Checks that this kernel can be launched with this configuration on this GPU.
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
    if grid.count().saturating_mul(threads) > u64::from(u32::MAX) {
        return Err(LaunchRefusal::TooManyThreadsInGrid { grid, block });
    }
    // Checked before the kernel's thread limit, which follows from its registers: this error names
    // the registers.
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
    check_attributes(config, function.cluster, device)
}

/// The most blocks per cluster that every GPU with clusters allows.
const MAX_CLUSTER: u32 = 8;

/// Checks that this launch's attributes suit the GPU, and the clusters that the kernel fixes.
fn check_attributes(
    config: &LaunchConfig,
    fixed: Option<Dim3>,
    device: &DeviceLimits,
) -> Result<(), LaunchRefusal> {
    let LaunchConfig { grid, cluster, dependent, .. } = *config;
    let compute_capability = device.compute_capability;
    if (cluster.is_some() || dependent) && compute_capability < (9, 0) {
        let what = if dependent { "a dependent launch" } else { "a launch with clusters" };
        return Err(LaunchRefusal::AttributeUnsupported { what, compute_capability });
    }
    if let Some(blocks) = cluster {
        if !(1..=MAX_CLUSTER).contains(&blocks) {
            return Err(LaunchRefusal::ClusterSize { blocks, limit: MAX_CLUSTER });
        }
        if let Some(fixed) = fixed.filter(|fixed| *fixed != blocks.into()) {
            return Err(LaunchRefusal::OtherCluster { blocks, fixed });
        }
    }
    let Some(cluster) = fixed.or(cluster.map(Dim3::from)) else { return Ok(()) };
    let mut extents = grid.to_array().into_iter().zip(cluster.to_array());
    if extents.any(|(grid, cluster)| !grid.is_multiple_of(cluster)) {
        return Err(LaunchRefusal::PartialCluster { grid, cluster });
    }
    Ok(())
}

/// Checks that a launch passes a device communicator, and that NCCL made it.
pub(crate) fn check_dev_comm(dev_comm: Option<&DevComm>) -> Result<&DevComm, LaunchRefusal> {
    match dev_comm {
        None => Err(LaunchRefusal::NoDevComm),
        Some(dev_comm) if dev_comm.magic != API_MAGIC => Err(LaunchRefusal::ForeignDevComm),
        Some(dev_comm) => Ok(dev_comm),
    }
}

/// Checks that the arguments of a safe launch are of one communicator, with known lengths.
pub(crate) fn check_safe(args: ArgInfo<'_>) -> Result<(), LaunchRefusal> {
    match args {
        ArgInfo { mixed: true, .. } => Err(LaunchRefusal::MixedCommunicators),
        ArgInfo { several_dev_comms: true, .. } => Err(LaunchRefusal::SeveralDevComms),
        ArgInfo { unchecked: true, .. } => Err(LaunchRefusal::UncheckedWindow),
        _ => Ok(()),
    }
}

/// Returns the GIN back end of the device communicator's connections, if it is the same for all.
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

/// Checks that a kernel can be launched with this device communicator. `lsa_barriers` says whether
/// it opens sessions on LSA barriers, alone or as the inner part of hybrid barriers; `stamp` is the
/// version of NCCL's device code in it, and `per_multiprocessor` its occupancy in blocks.
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
    let LaunchConfig { grid, block, .. } = *config;
    // Ranks of threads, and indices of barriers, are x alone.
    if [grid, block].iter().any(|extents| (extents.y, extents.z) != (1, 1)) {
        return Err(LaunchRefusal::NotOneDimensional { grid, block });
    }
    let blocks = grid.count();
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
