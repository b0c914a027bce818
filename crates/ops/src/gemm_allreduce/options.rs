//! The options, and what the ranks agree on before they allocate: the form of the kernel, its grid,
//! its workspace.

use bytemuck::{Pod, Zeroable};
use devcomm_host::{CollectiveCall, Communicator, Kernels, Result, Stream};
use devcomm_kernels::{self as kernels, GemmForm, GemmWorkspace};
use devcomm_types::Kernel;
use half::bf16;
use std::num::NonZeroU32;

use super::GemmAllReduce;
use super::wire::{Wire, by_wire};
use crate::KERNELS;
use crate::agree::{hash, or_default};
use crate::check::{refuse, require_context};

/// The options of a [`GemmAllReduce`], the same on every rank.
///
/// ```no_run
/// # use devcomm::{Communicator, GemmAllReduce, Result, Stream, kernels::GemmForm};
/// # fn f(comm: &Communicator, stream: &Stream) -> Result<()> {
/// let gemm = GemmAllReduce::options().form(GemmForm::Mma).build(comm, stream, 1000, 4096)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before `build`"]
pub struct GemmOptions {
    form: Option<GemmForm>,
    max_blocks: Option<NonZeroU32>,
    wire: Wire,
}

impl GemmOptions {
    /// The default options.
    pub const fn new() -> Self {
        Self { form: None, max_blocks: None, wire: Wire::Bf16 }
    }

    /// Selects this form of [`Strips`](crate::GemmAllReducePlan::Strips), which is then the plan of
    /// all shapes. Default: the fastest that the GPUs of all ranks support.
    pub const fn form(mut self, form: GemmForm) -> Self {
        self.form = Some(form);
        self
    }

    /// Launches at most that many blocks, which leaves multiprocessors to other kernels. Default:
    /// the number that can be resident on every rank's GPU.
    pub const fn max_blocks(mut self, blocks: NonZeroU32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Selects the type in which partial sums travel. Default: [`Wire::Bf16`]. In others they do by
    /// [`Strips`](crate::GemmAllReducePlan::Strips). In [`Wire::E4m3`] on two Hopper GPUs shapes
    /// that fill the GPU have the plan [`Wide`](crate::GemmAllReducePlan::Wide).
    pub const fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Creates the operation, as [`GemmAllReduce::new`] does.
    ///
    /// # Errors
    ///
    /// As [`GemmAllReduce::new`], and
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for a form that this GPU
    /// does not support.
    pub fn build(
        self,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<GemmAllReduce> {
        comm.together(NAME, || {
            GemmAllReduce::build(Plan::new(self, comm, stream, m, n)?, comm, stream, [m, n])
        })
    }

    /// The call of all ranks, with the options.
    fn call(self, comm: &Communicator, m: usize, n: usize) -> CollectiveCall<'_> {
        // Destructured, so that a new option cannot be forgotten here.
        let Self { form, max_blocks, wire } = self;
        let call = comm.collective(NAME).option("m", m).option("n", n);
        call.option("form", or_default(form.map(|form| format!("{form:?}"))))
            .option("max_blocks", or_default(max_blocks))
            .option("wire", wire)
    }

    /// How many blocks of a form can be resident at once.
    fn blocks<K: Kernel>(self, compiled: &Kernels, form: GemmForm) -> Result<u32> {
        let resident = compiled.resident_blocks::<K>(form.threads(), form.dynamic_shared())?;
        Ok(self.max_blocks.map_or(resident, |most| resident.min(most.get())))
    }
}

/// The call that all ranks make together.
const NAME: &str = "GemmAllReduce::new";

const FILES: &[&str] =
    &[kernels::gemm_allreduce_wgmma::<bf16>::FILE, kernels::gemm_allreduce_mma::<bf16>::FILE];

fn load(comm: &Communicator) -> Result<Kernels> {
    let set = KERNELS.only(FILES);
    Kernels::load(comm.context(), &set)
}

/// What all ranks agreed on.
pub(super) struct Plan {
    pub(super) compiled: Kernels,
    pub(super) form: GemmForm,
    pub(super) wire: Wire,
    pub(super) blocks: u32,
    pub(super) workspace: GemmWorkspace,
    /// Whether the ranks can exchange rounded products, and whether they do so by default: if no
    /// form was asked for, and the GPUs are the same. Not in f32.
    pub(super) exchanges: bool,
    pub(super) exchanges_by_default: bool,
}

impl Plan {
    /// *Collective*.
    fn new(
        options: GemmOptions,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<Self> {
        let own = Offer::new(options, comm, stream, m, n);
        let (compiled, all) = options.call(comm, m, n).agree(own)?;
        let (form, blocks) = choose(options.form, &all);
        let wire = options.wire;
        let is_rounded = form == GemmForm::Wgmma && wire != Wire::F32;
        let exchanges = is_rounded && comm.n_ranks() >= 2;
        let is_same = all.iter().all(|offer| *offer == all[0]);
        let exchanges_by_default = exchanges && options.form.is_none() && is_same;
        let workspace = by_wire!(wire, W => form.workspace::<W>(m, n, comm.n_ranks()));
        let Some(workspace) = workspace else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        Ok(Self { compiled, form, wire, blocks, workspace, exchanges, exchanges_by_default })
    }
}

/// What a rank supports.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct Offer {
    /// A hash of the GPU's name, by which tables have plans.
    gpu: u64,
    /// Resident blocks of the Hopper form and of the portable one; 0 for a form that is not asked
    /// for or not supported here.
    blocks: [u32; 2],
}

impl Offer {
    fn new(
        options: GemmOptions,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<(Kernels, Self)> {
        comm.require_single_lsa_team()?;
        require_context("the stream", stream.context(), comm.context())?;
        if m == 0 || n == 0 {
            return refuse(format!("a product of {m} x {n} has no elements"));
        }
        let (form, compiled) = (options.form, load(comm)?);
        let hopper = compiled.info::<kernels::gemm_allreduce_wgmma<bf16>>().is_ok();
        let wgmma = match form {
            Some(GemmForm::Mma) => 0,
            None if !hopper => 0,
            _ => by_wire!(options.wire, W => {
                options.blocks::<kernels::gemm_allreduce_wgmma<W>>(&compiled, GemmForm::Wgmma)?
            }),
        };
        let mma = match form {
            Some(GemmForm::Wgmma) => 0,
            _ => by_wire!(options.wire, W => {
                options.blocks::<kernels::gemm_allreduce_mma<W>>(&compiled, GemmForm::Mma)?
            }),
        };
        let gpu = hash(comm.context().device_name()?);
        Ok((compiled, Self { gpu, blocks: [wgmma, mma] }))
    }
}

/// The form and the grid of all ranks: the Hopper form if all support it and none asks for another,
/// and the minimum of the ranks' resident blocks.
fn choose(asked: Option<GemmForm>, all: &[Offer]) -> (GemmForm, u32) {
    let least = |i: usize| all.iter().map(|offer| offer.blocks[i]).min().unwrap_or(0);
    match asked {
        Some(GemmForm::Mma) => (GemmForm::Mma, least(1)),
        None if least(0) == 0 => (GemmForm::Mma, least(1)),
        _ => (GemmForm::Wgmma, least(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_and_the_grid_are_those_that_all_ranks_can_have() {
        let offer = |blocks| Offer { gpu: 1, blocks };
        let (hopper, other) = (offer([132, 264]), offer([0, 100]));
        assert_eq!(choose(None, &[hopper, hopper]), (GemmForm::Wgmma, 132));
        assert_eq!(choose(None, &[hopper, other]), (GemmForm::Mma, 100));
        let asked = Some(GemmForm::Mma);
        assert_eq!(choose(asked, &[offer([0, 264]), offer([0, 200])]), (GemmForm::Mma, 200));
    }
}
