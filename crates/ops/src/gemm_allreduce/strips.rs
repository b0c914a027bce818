//! The fused product that sends strips of partial sums to their owners: its workspace and launches.

use devcomm_kernels::gemm_allreduce::GemmWorkspace;
use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::{SHARED, THREADS, tiles, workspace};

use super::wire::{Wire, by_wire};
use super::{AllReduce, Plan};
use crate::fused::*;
use crate::gemm::Matrices;
use crate::prelude::*;

/// The plan, and its memory once it is prepared.
pub(super) struct Strips {
    pub(super) compiled: Kernels,
    pub(super) wire: Wire,
    /// The blocks that are resident on all GPUs.
    pub(super) blocks: u32,
    pub(super) workspace: GemmWorkspace,
    pub(super) memory: OnceCell<Memory>,
}

pub(super) struct Memory {
    dev_comm: DevCommResource,
    partials: Window<u32>,
    flags: Window<u32>,
}

impl Strips {
    /// Returns the workspace, if a product of this size fits into it.
    fn memory(&self, ranks: usize, extents: Extents) -> Option<&Memory> {
        let [m, n, _] = extents.lengths();
        let sizes = by_wire!(self.wire, W => workspace::<W>(m, n, ranks))?;
        self.memory.get().filter(|memory| {
            sizes.partials <= memory.partials.len() && sizes.flags <= memory.flags.len()
        })
    }
}

impl Strategy<AllReduce> for Strips {
    fn supports(&self, base: &Base<AllReduce>, _: Plan, extents: Extents) -> bool {
        self.memory(base.comm.n_ranks(), extents).is_some()
    }

    fn prepare(&self, base: &Base<AllReduce>, _: Plan) -> Result<()> {
        let Self { blocks, workspace, .. } = self;
        // No kernel sets a flag before those of all ranks are zeroed, as new windows are.
        prepare_once(&self.memory, || {
            base.comm.together("GemmAllReduce: the plan strips", || {
                let requirements = DevCommRequirements::new().lsa_barriers(*blocks);
                Ok(Memory {
                    dev_comm: base.comm.create_dev_comm(requirements)?,
                    partials: base.comm.window(workspace.partials)?,
                    flags: base.comm.window(workspace.flags)?,
                })
            })
        })
    }

    unsafe fn launch(&self, base: &Base<AllReduce>, _: Plan, operands: &Operands) -> Result<()> {
        let Matrices { a, b, shape: [m, n, k], .. } = operands.matrices;
        let (c, _) = window::<bf16, _>("C", &operands.slices[2])?;
        let [rows, columns, _] = operands.extents.lengths();
        let Self { compiled, wire, blocks, .. } = self;
        let memory = self.memory(base.comm.n_ranks(), operands.extents);
        let (Some(memory), Some(tiles)) = (memory, tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmAllReduce for it"
            ));
        };
        let config = LaunchConfig::new((*blocks).min(tiles), THREADS).with_dynamic_shared(SHARED);
        let Memory { dev_comm, partials, flags } = memory;
        let args = (dev_comm, a, b, &c, partials, flags, m, n, k);
        let target = compiled.on(&base.stream);
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches.
        // `memory` is large enough, and `prepare` had its flags zeroed. Equal shapes give equal
        // grids. Ranks that launch different shapes or windows get wrong sums or deadlock, as in
        // every collective, but access nothing outside the windows: every index is below the
        // lengths that were checked, for C the minimum over the ranks, and the workspace has the
        // same length in all ranks.
        unsafe {
            by_wire!(wire, W => kernels::gemm_allreduce_mma::<W>::launch(args, config, &target))
        }
    }
}
