//! Kernel entry points: their attributes, their occupancy, and the checks before a launch.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use devcomm_locate::NcclVersion;
use devcomm_types::{Dim3, LaunchConfig};
use parking_lot::Mutex;

use super::sidecar::ParamInfo;
use crate::device::context::Context;
use crate::device::launch::{FunctionInfo, check_shape};
use crate::error::{Error, LaunchError, Result};
use crate::machine::CallLock;
use crate::sys::cuda::FunctionAttribute;
use crate::sys::cuda::module::{FunctionHandle, LaunchShape};

/// A kernel function: an entry point of a loaded module, or a simulated kernel's body in Rust.
pub(super) struct Entry {
    pub(super) function: FunctionHandle,
    pub(super) info: FunctionInfo,
    /// The compiled parameters; `None` for a body in Rust, which the Rust compiler has checked.
    pub(super) params: Option<Vec<ParamInfo>>,
    /// Whether the kernel opens sessions on LSA barriers.
    pub(super) lsa_barriers: bool,
    /// The version of NCCL's device code in the module.
    pub(super) stamp: Option<NcclVersion>,
    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` as set so far.
    allowed_shared: AtomicU32,
    /// Held while it is raised.
    raising: CallLock,
    /// The occupancies asked for so far, by threads per block, dynamic shared memory and blocks per
    /// cluster: clusters of the GPU, or for 0 blocks per cluster blocks per multiprocessor.
    occupancy: Mutex<BTreeMap<[u32; 3], u32>>,
}

impl Entry {
    pub(super) fn new(function: FunctionHandle) -> Result<Self> {
        let info = info_of(&function)?;
        let (params, lsa_barriers, stamp) = Default::default();
        let (allowed_shared, raising, occupancy) = Default::default();
        Ok(Self { function, info, params, lsa_barriers, stamp, allowed_shared, raising, occupancy })
    }

    /// Checks the launch shape, and raises the function's limit of dynamic shared memory.
    pub(super) fn prepare(
        &self,
        context: &Context,
        kernel: &'static str,
        config: &LaunchConfig,
    ) -> Result<Prepared<'_>> {
        let device = context.limits();
        check_shape(config, &self.info, device)
            .map_err(|refusal| Error::Launch(LaunchError::Refused { kernel, refusal }))?;
        context.cuda().bind()?;
        let dynamic_shared = config.dynamic_shared;
        // The dynamic shared memory that a launch may use without raising the limit.
        let free = device.shared_per_block.saturating_sub(self.info.static_shared);
        let is_allowed = || dynamic_shared <= free.max(self.allowed_shared.load(Ordering::Acquire));
        if !is_allowed() {
            let _raising = self.raising.lock(context.machine(), None, || Ok(()))?;
            // Another thread may have allowed more meanwhile.
            if !is_allowed() {
                self.function.allow_dynamic_shared(dynamic_shared)?;
                self.allowed_shared.store(dynamic_shared, Ordering::Release);
            }
        }
        // `check_shape` has limited the threads to far fewer.
        let threads = u32::try_from(config.block.count()).unwrap_or(u32::MAX);
        Ok(Prepared { entry: self, threads, dynamic_shared })
    }
}

/// A kernel with a shape that the GPU allows.
pub(super) struct Prepared<'a> {
    entry: &'a Entry,
    threads: u32,
    dynamic_shared: u32,
}

impl Prepared<'_> {
    /// Returns the occupancy: the number of blocks that fit on one multiprocessor.
    pub(super) fn blocks(&self) -> Result<u32> {
        let (threads, shared) = (self.threads, self.dynamic_shared);
        self.occupancy(0, || self.entry.function.blocks_per_sm(threads, shared))
    }

    /// Returns the occupancy: the number of clusters of `cluster` blocks that fit on the GPU.
    pub(super) fn clusters(&self, cluster: u32, shape: &LaunchShape) -> Result<u32> {
        self.occupancy(cluster, || self.entry.function.resident_clusters(shape))
    }

    fn occupancy(&self, cluster: u32, ask: impl FnOnce() -> Result<u32>) -> Result<u32> {
        let key = [self.threads, self.dynamic_shared, cluster];
        let known = self.entry.occupancy.lock().get(&key).copied();
        if let Some(known) = known {
            return Ok(known);
        }
        let occupancy = ask()?;
        self.entry.occupancy.lock().insert(key, occupancy);
        Ok(occupancy)
    }
}

fn info_of(function: &FunctionHandle) -> Result<FunctionInfo> {
    use FunctionAttribute as A;
    Ok(FunctionInfo {
        registers: function.attribute(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
        max_threads_per_block: function.attribute(A::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        static_shared: function.attribute(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        local: function.attribute(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        cluster: match function.attribute(A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)? {
            0 => None,
            // Other extents that the driver reports as 0 are 1.
            x => Some(Dim3 {
                x,
                y: function.attribute(A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT)?.max(1),
                z: function.attribute(A::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH)?.max(1),
            }),
        },
    })
}
