//! The fused product that sends strips of partial sums to their owners: its workspace and launches.

use std::cell::OnceCell;

use devcomm_host::{DevCommRequirements, DevCommResource, LaunchConfig, Result, Window};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::{SHARED, THREADS, tiles, workspace};

use super::options::Agreed;
use super::wire::{Wire, by_wire};
use super::{AllReduce, Plan};
use crate::check::refuse;
use crate::extents::Extents;
use crate::fused::{Base, Operands, Strategy, prepare_once};
use crate::gemm::Matrices;
use crate::launch::Takes;

/// What the ranks agreed on, and its memory, if it is needed.
pub(super) struct Strips {
    plan: Agreed,
    memory: OnceCell<Memory>,
}

struct Memory {
    dev_comm: DevCommResource,
    partials: Window<u32>,
    flags: Window<u32>,
}

impl Strips {
    pub(super) fn new(plan: Agreed) -> Self {
        Self { plan, memory: OnceCell::new() }
    }

    pub(super) fn wire(&self) -> Wire {
        self.plan.wire
    }

    pub(super) fn blocks(&self) -> u32 {
        self.plan.blocks
    }

    /// The workspace, if a product of this size fits into it.
    fn memory(&self, ranks: usize, extents: Extents) -> Option<&Memory> {
        let [m, n, _] = extents.lengths();
        let sizes = by_wire!(self.plan.wire, W => workspace::<W>(m, n, ranks))?;
        self.memory.get().filter(|memory| {
            sizes.partials <= memory.partials.len() && sizes.flags <= memory.flags.len()
        })
    }
}

impl Strategy<AllReduce> for Strips {
    fn supports(&self, on: &Base<AllReduce>, _: Plan, extents: Extents) -> bool {
        self.memory(on.comm.n_ranks(), extents).is_some()
    }

    fn prepare(&self, on: &Base<AllReduce>, _: Plan) -> Result<()> {
        let Agreed { blocks, workspace, .. } = self.plan;
        // No kernel sets a flag before those of all ranks are zeroed, as new windows are.
        prepare_once(&self.memory, || {
            on.comm.together("GemmAllReduce: the plan strips", || {
                let requirements = DevCommRequirements::new().lsa_barriers(blocks);
                Ok(Memory {
                    dev_comm: on.comm.create_dev_comm(requirements)?,
                    partials: on.comm.window(workspace.partials)?,
                    flags: on.comm.window(workspace.flags)?,
                })
            })
        })
    }

    unsafe fn launch(
        &self,
        on: &Base<AllReduce>,
        _: Plan,
        of: &Operands<'_, AllReduce>,
    ) -> Result<()> {
        let Matrices { a, b, shape: [m, n, k], .. } = of.matrices();
        let (c, stream, [rows, columns, _]) = (of.c, &on.stream, of.extents.lengths());
        let Agreed { compiled, wire, blocks, .. } = &self.plan;
        let memory = self.memory(on.comm.n_ranks(), of.extents);
        let (Some(memory), Some(tiles)) = (memory, tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmAllReduce for it"
            ));
        };
        let config = LaunchConfig::new((*blocks).min(tiles), THREADS).with_dynamic_shared(SHARED);
        let Memory { dev_comm, partials, flags } = memory;
        let args = (dev_comm, a, b, c, partials, flags, m, n, k);
        let target = compiled.on(stream);
        // SAFETY: the caller's contract. The workspace is large enough, and its flags were zeroed.
        // Equal shapes give equal grids. Ranks that launch different shapes or windows get wrong
        // sums or deadlock, as in every collective, but access nothing outside the windows: every
        // index is below the lengths that were checked, for C the minimum over the ranks, and the
        // workspace has the same length in all ranks.
        unsafe {
            by_wire!(wire, W => kernels::gemm_allreduce_mma::<W>::launch(args, config, &target))
        }
    }
}
