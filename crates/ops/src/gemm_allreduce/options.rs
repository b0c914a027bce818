//! The options, and what the ranks agree on before they allocate: the grid, the workspace, and
//! whether all GPUs are of Hopper's kind.

use bytemuck::{Pod, Zeroable};
use devcomm_host::{CollectiveCall, Communicator, Kernels, Result, Stream};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm_allreduce::GemmWorkspace;
use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::{SHARED, THREADS, workspace};
use devcomm_types::Kernel;
use half::bf16;
use std::num::NonZeroU32;

use super::wire::{Wire, by_wire};
use super::{AllReduce, GemmAllReduce};
use crate::KERNELS;
use crate::agree::{hash, or_default};
use crate::check::refuse;
use crate::fused::{check_most, is_hopper};

/// The options of a [`GemmAllReduce`], the same on every rank.
///
/// ```no_run
/// # use devcomm::{Communicator, GemmAllReduce, Result, Stream, Wire};
/// # fn f(comm: &Communicator, stream: &Stream) -> Result<()> {
/// let gemm = GemmAllReduce::options().wire(Wire::F32).build(comm, stream, 1000, 4096)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before `build`"]
pub struct GemmOptions {
    max_blocks: Option<NonZeroU32>,
    wire: Wire,
}

impl GemmOptions {
    /// The default options.
    pub const fn new() -> Self {
        Self { max_blocks: None, wire: Wire::Bf16 }
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
    /// As [`GemmAllReduce::new`].
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
        let Self { max_blocks, wire } = self;
        let call = comm.collective(NAME).option("m", m).option("n", n);
        call.option("max_blocks", or_default(max_blocks)).option("wire", wire)
    }

    /// How many blocks can be resident at once.
    fn blocks<K: Kernel>(self, compiled: &Kernels) -> Result<u32> {
        let resident = compiled.resident_blocks::<K>(THREADS, SHARED)?;
        Ok(self.max_blocks.map_or(resident, |most| resident.min(most.get())))
    }
}

/// The call that all ranks make together.
const NAME: &str = "GemmAllReduce::new";

const FILES: &[&str] = &[kernels::gemm_allreduce_mma::<bf16>::FILE];

fn load(comm: &Communicator) -> Result<Kernels> {
    let set = KERNELS.only(FILES);
    Kernels::load(comm.context(), &set)
}

/// What all ranks agreed on.
pub(super) struct Plan {
    pub(super) compiled: Kernels,
    pub(super) wire: Wire,
    pub(super) blocks: u32,
    pub(super) workspace: GemmWorkspace,
    /// Whether the ranks can exchange rounded products, and whether they do so by default: if the
    /// GPUs are the same. Not in f32.
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
        let blocks = all.iter().map(|offer| offer.blocks).min().unwrap_or(0);
        let wire = options.wire;
        let are_hopper = all.iter().all(|offer| offer.is_hopper != 0);
        let exchanges = are_hopper && wire != Wire::F32 && comm.n_ranks() >= 2;
        let is_same = all.iter().all(|offer| *offer == all[0]);
        let exchanges_by_default = exchanges && is_same;
        let workspace = by_wire!(wire, W => workspace::<W>(m, n, comm.n_ranks()));
        let Some(workspace) = workspace else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        Ok(Self { compiled, wire, blocks, workspace, exchanges, exchanges_by_default })
    }
}

/// What a rank supports.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct Offer {
    /// A hash of the GPU's name, by which tables have plans.
    gpu: u64,
    /// Whether the GPU is one of Hopper's, as 0 or 1.
    is_hopper: u32,
    /// Resident blocks.
    blocks: u32,
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
        check_most::<AllReduce>(comm, stream, [m, n])?;
        let compiled = load(comm)?;
        let blocks = by_wire!(options.wire, W => {
            options.blocks::<kernels::gemm_allreduce_mma<W>>(&compiled)?
        });
        let is_hopper = u32::from(is_hopper(comm));
        let gpu = hash(comm.context().device_name()?);
        Ok((compiled, Self { gpu, is_hopper, blocks }))
    }
}
