//! The options, and what the ranks agree on before they allocate: the form of the kernel, its grid,
//! its workspace.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::slice;

use bytemuck::{Pod, Zeroable};
use devcomm_host::{Communicator, Kernels, Result, Stream};
use devcomm_kernels::{self as kernels, GemmForm, GemmWorkspace};
use devcomm_types::Kernel;
use half::bf16;

use super::GemmAllReduce;
use super::wire::{Wire, by_wire};
use crate::KERNELS;
use crate::agree::cannot_take_part;
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
        GemmAllReduce::build(Plan::new(self, comm, stream, m, n)?, comm, stream, [m, n])
    }

    /// How many blocks of a form can be resident at once.
    fn blocks<K: Kernel>(self, compiled: &Kernels, form: GemmForm) -> Result<u32> {
        let resident = compiled.resident_blocks::<K>(form.threads(), form.dynamic_shared())?;
        Ok(self.max_blocks.map_or(resident, |most| resident.min(most.get())))
    }
}

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
        let mine = Proposal::new(options, comm, stream, m, n);
        // A rank with an error sends an empty list, so that the others do not wait for it.
        let sent = mine.as_ref().map_or(&[][..], |(_, proposal)| slice::from_ref(proposal));
        let all = comm.host_all_gather(sent)?;
        let (compiled, _) = mine?;
        let (form, blocks) = agree(&all)?;
        let wire = options.wire;
        let is_rounded = form == GemmForm::Wgmma && wire != Wire::F32;
        let exchanges = is_rounded && comm.n_ranks() >= 2;
        let is_same = all.iter().flatten().all(|proposal| *proposal == all[0][0]);
        let exchanges_by_default = exchanges && options.form.is_none() && is_same;
        let workspace = by_wire!(wire, W => form.workspace::<W>(m, n, comm.n_ranks()));
        let Some(workspace) = workspace else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        Ok(Self { compiled, form, wire, blocks, workspace, exchanges, exchanges_by_default })
    }
}

/// What a rank asks for and supports. A rank with an error sends none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct Proposal {
    form: u64,
    wire: u64,
    m: u64,
    n: u64,
    /// A hash of the GPU's name, by which tables have plans.
    gpu: u64,
    /// Resident blocks of the Hopper form and of the portable one; 0 for a form that is not asked
    /// for or not supported here.
    blocks: [u32; 2],
}

impl Proposal {
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
        let mut gpu = DefaultHasher::new();
        comm.context().device_name()?.hash(&mut gpu);
        let (gpu, blocks) = (gpu.finish(), [wgmma, mma]);
        let (form, wire) = (code(form), options.wire as u64);
        let proposal = Self { form, wire, m: m as u64, n: n as u64, gpu, blocks };
        Ok((compiled, proposal))
    }
}

/// A form as a number in a [`Proposal`]; 0 is "any form".
fn code(form: Option<GemmForm>) -> u64 {
    form.map_or(0, |form| 1 + form as u64)
}

/// The form and the grid of all ranks: the Hopper form if all support it and none asks for another,
/// and the minimum of the ranks' resident blocks.
fn agree(all: &[Vec<Proposal>]) -> Result<(GemmForm, u32)> {
    let first = all.first().and_then(|proposal| proposal.first());
    let mut blocks = [u32::MAX; 2];
    for (rank, proposal) in all.iter().enumerate() {
        let [proposal] = proposal[..] else {
            return cannot_take_part(rank);
        };
        let asked = |of: &Proposal| (of.form, of.wire, of.m, of.n);
        if first.is_some_and(|first| asked(first) != asked(&proposal)) {
            return refuse(format!(
                "rank {rank} asks for another form, another type of partial sums or other sizes \
                 than rank 0: they must not differ"
            ));
        }
        blocks = [0, 1].map(|i| blocks[i].min(proposal.blocks[i]));
    }
    let asked = first.map_or(code(None), |proposal| proposal.form);
    let portable = asked == code(Some(GemmForm::Mma)) || asked == code(None) && blocks[0] == 0;
    Ok(if portable { (GemmForm::Mma, blocks[1]) } else { (GemmForm::Wgmma, blocks[0]) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::message;

    #[test]
    fn ranks_agree_on_what_all_can_do_or_say_who_differs() {
        let proposal =
            |form, n, blocks| vec![Proposal { form: code(form), wire: 0, m: 7, n, gpu: 1, blocks }];
        let hopper = proposal(None, 9, [132, 264]);
        let other = proposal(None, 9, [0, 100]);
        assert_eq!(agree(&[hopper.clone(), hopper.clone()]).unwrap(), (GemmForm::Wgmma, 132));
        assert_eq!(agree(&[hopper.clone(), other]).unwrap(), (GemmForm::Mma, 100));
        let mma = proposal(Some(GemmForm::Mma), 9, [0, 264]);
        assert_eq!(agree(&[mma.clone(), mma.clone()]).unwrap(), (GemmForm::Mma, 264));
        assert!(message(agree(&[hopper.clone(), mma])).contains("rank 1 asks for another form"));
        let larger = proposal(None, 10, [132, 264]);
        assert!(message(agree(&[hopper.clone(), larger])).contains("rank 1 asks"));
        let in_f32 = vec![Proposal { wire: Wire::F32 as u64, ..hopper[0] }];
        assert!(message(agree(&[hopper.clone(), in_f32])).contains("another type of partial sums"));
        assert!(message(agree(&[vec![], hopper])).contains("rank 0 cannot take part"));
    }
}
