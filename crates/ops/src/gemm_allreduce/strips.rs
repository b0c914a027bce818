//! The fused product that sends strips of partial sums to their owners: its workspace and launches.

use std::cell::OnceCell;

use devcomm_host::{
    Communicator, DevCommRequirements, DevCommResource, Element, LaunchConfig, Result, Stream,
    TensorMapDesc, Window,
};
use devcomm_kernels::{self as kernels, GemmForm};
use half::bf16;

use super::options::Plan;
use super::wire::{Wire, by_wire};
use crate::check::refuse;
use crate::gemm::Matrices;

/// What the ranks agreed on, and its memory, if it is needed.
pub(super) struct Strips {
    plan: Plan,
    memory: OnceCell<Memory>,
}

struct Memory {
    dev_comm: DevCommResource,
    partials: Window<u32>,
    flags: Window<u32>,
}

impl Strips {
    pub(super) fn new(plan: Plan) -> Self {
        Self { plan, memory: OnceCell::new() }
    }

    pub(super) fn form(&self) -> GemmForm {
        self.plan.form
    }

    pub(super) fn wire(&self) -> Wire {
        self.plan.wire
    }

    pub(super) fn blocks(&self) -> u32 {
        self.plan.blocks
    }

    /// Whether products are launched from here on.
    pub(super) fn is_prepared(&self) -> bool {
        self.memory.get().is_some()
    }

    /// Whether there is a workspace, and a product of this size fits into it.
    pub(super) fn supports(&self, n_ranks: usize, [rows, columns]: [usize; 2]) -> bool {
        let Plan { form, wire, .. } = &self.plan;
        let sizes = by_wire!(wire, W => form.workspace::<W>(rows, columns, n_ranks));
        self.memory.get().zip(sizes).is_some_and(|(memory, sizes)| {
            sizes.partials <= memory.partials.len() && sizes.flags <= memory.flags.len()
        })
    }

    /// Allocates the workspace. *Collective*.
    pub(super) fn prepare(&self, comm: &Communicator) -> Result<()> {
        if self.is_prepared() {
            return Ok(());
        }
        let Plan { blocks, workspace, .. } = self.plan;
        // No kernel sets a flag before those of all ranks are zeroed, as new windows are.
        let memory = comm.together("GemmAllReduce: the plan strips", || {
            let requirements = DevCommRequirements::new().lsa_barriers(blocks);
            let dev_comm = comm.create_dev_comm(requirements)?;
            let (partials, flags) =
                (comm.window(workspace.partials)?, comm.window(workspace.flags)?);
            Ok(Memory { dev_comm, partials, flags })
        });
        let _ = self.memory.set(memory?);
        Ok(())
    }

    /// Enqueues a product.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a product that is too large
    /// for the workspace; those of the launch.
    ///
    /// # Safety
    ///
    /// The matrices begin at multiples of 16 bytes, have the elements of the shape, C in every
    /// rank, and stay allocated until the product has ended. Launches are ordered, and the same in
    /// all ranks.
    pub(super) unsafe fn launch(
        &self,
        n_ranks: usize,
        stream: &Stream,
        matrices: Matrices,
        c: &Window<bf16>,
    ) -> Result<()> {
        let Matrices { a, b, shape: [m, n, k], .. } = matrices;
        let Plan { compiled, form, wire, blocks, .. } = &self.plan;
        let (rows, columns) = (m as usize, n as usize);
        let memory = self.memory.get().filter(|_| self.supports(n_ranks, [rows, columns]));
        let (Some(memory), Some(tiles)) = (memory, form.tiles(rows, columns)) else {
            return refuse(format!(
                "a product of {m} x {n} elements needs a larger workspace: make another \
                 GemmAllReduce for it"
            ));
        };
        let config = LaunchConfig::new((*blocks).min(tiles), form.threads())
            .with_dynamic_shared(form.dynamic_shared());
        let Memory { dev_comm, partials, flags } = memory;
        let target = compiled.on(stream);
        // SAFETY: the caller's contract. The workspace is large enough, and its flags were zeroed.
        // Equal shapes give equal grids. Ranks that launch different shapes or windows get wrong
        // sums or deadlock, as in every collective, but access nothing outside the windows: every
        // index is below the lengths that were checked, for C the minimum over the ranks, and the
        // workspace has the same length in all ranks.
        unsafe {
            match form {
                GemmForm::Wgmma => {
                    let map = |address, rows, tile_rows| {
                        let data_type = bf16::DATA_TYPE;
                        let matrix =
                            TensorMapDesc { address, rows, columns: k, tile_rows, data_type };
                        stream.context().tensor_map(&matrix)
                    };
                    let a = map(a, m, GemmForm::TILE_ROWS as u32)?;
                    let b = map(b, n, form.tile_columns() as u32)?;
                    by_wire!(wire, W => {
                        let product = kernels::gemm_allreduce_wgmma::<W>::args(
                            dev_comm, a, b, c, partials, flags, m, n, k,
                        );
                        product.config(config).launch(&target)
                    })
                }
                GemmForm::Mma => by_wire!(wire, W => {
                    let product = kernels::gemm_allreduce_mma::<W>::args(
                        dev_comm, a, b, c, partials, flags, m, n, k,
                    );
                    product.config(config).launch(&target)
                }),
            }
        }
    }
}
