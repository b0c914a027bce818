//! The fused product that sends strips of partial sums to their owners: its workspace and launches.

use std::num::NonZeroU32;

use devcomm_kernels::gemm_allreduce::GemmWorkspace;
use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::{SHARED, THREADS, tiles, workspace};

use super::wire::{Wire, by_wire};
use super::{AllReduce, Plan};
use crate::fused::*;
use crate::gemm::Matrices;
use crate::prelude::*;

/// The plan, and its kernel and memory once it is prepared.
pub(super) struct Strips {
    pub(super) wire: Wire,
    pub(super) max_blocks: Option<NonZeroU32>,
    pub(super) workspace: GemmWorkspace,
    pub(super) prepared: OnceCell<Prepared>,
}

pub(super) struct Prepared {
    compiled: Kernels,
    /// The blocks that are resident on all GPUs.
    pub(super) blocks: u32,
    dev_comm: DevCommResource,
    partials: Window<u32>,
    flags: Window<u32>,
}

impl Strips {
    /// Returns what is prepared, if a product of this size fits into its workspace.
    fn prepared(&self, ranks: usize, extents: Extents) -> Option<&Prepared> {
        let [m, n, _] = extents.lengths();
        let sizes = by_wire!(self.wire, W => workspace::<W>(m, n, ranks))?;
        self.prepared.get().filter(|Prepared { partials, flags, .. }| {
            sizes.partials <= partials.len() && sizes.flags <= flags.len()
        })
    }
}

impl Strategy<AllReduce> for Strips {
    fn supports(&self, base: &Base<AllReduce>, _: Plan, extents: Extents) -> bool {
        self.prepared(base.comm.n_ranks(), extents).is_some()
    }

    fn prepare(&self, base: &Base<AllReduce>, plan: Plan) -> Result<()> {
        let (comm, GemmWorkspace { partials, flags, .. }) = (&base.comm, &self.workspace);
        let load = || {
            let set = KERNELS.only(&[kernels::gemm_allreduce_mma::<bf16>::FILE]);
            let compiled = Kernels::load(comm.context(), &set)?;
            let resident = by_wire!(self.wire, W => {
                compiled.resident_blocks::<kernels::gemm_allreduce_mma<W>>(THREADS, SHARED)?
            });
            let blocks = self.max_blocks.map_or(resident, |most| resident.min(most.get()));
            Ok((compiled, vec![[blocks, 0]]))
        };
        // No kernel sets a flag before those of all ranks are zeroed, as new windows are.
        base.prepare((&self.prepared, plan), ANY_RANKS, load, |compiled, resident| {
            let blocks = resident[0][0];
            Ok(Prepared {
                compiled,
                blocks,
                dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
                partials: comm.window(*partials)?,
                flags: comm.window(*flags)?,
            })
        })
    }

    unsafe fn launch(&self, base: &Base<AllReduce>, _: Plan, operands: &Operands) -> Result<()> {
        let Matrices { a, b, shape: [m, n, k], .. } = operands.matrices;
        let (c, _) = window::<bf16, _>("C", &operands.slices[2], &base.comm)?;
        let [rows, columns, _] = operands.extents.lengths();
        let prepared = self.prepared(base.comm.n_ranks(), operands.extents);
        let (Some(prepared), Some(tiles)) = (prepared, tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmAllReduce for it"
            ));
        };
        let Prepared { compiled, blocks, dev_comm, partials, flags } = prepared;
        let config = LaunchConfig::new((*blocks).min(tiles), THREADS).with_dynamic_shared(SHARED);
        let args = (dev_comm, a, b, &c, partials, flags, m, n, k);
        let target = compiled.on(&base.stream);
        // SAFETY: the caller passes matrices that outlive the product, and orders the launches.
        // The workspace is large enough, and its flags were zeroed. Equal shapes give equal grids.
        // Ranks that launch different shapes or windows get wrong sums or deadlock, as in every
        // collective, but access nothing outside the windows: every index is below the lengths that
        // were checked, for C the minimum over the ranks, and the workspace has the same length in
        // all ranks.
        by_wire!(self.wire, W => unsafe {
            kernels::gemm_allreduce_mma::<W>::launch(args, config, &target)
        })
    }
}
