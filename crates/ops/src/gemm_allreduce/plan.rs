//! What the ranks agree on before anything is made: a form of the kernel, its grid, its workspace.

use std::num::NonZeroU32;
use std::slice;
use std::sync::LazyLock;

use bytemuck::{Pod, Zeroable};
use devcomm_host::{Communicator, KernelSet, Kernels, ModuleSource, Result, Stream};
use devcomm_kernels::{self as kernels, GemmForm, GemmWorkspace};
use devcomm_types::Kernel;

use super::GemmAllReduce;
use super::check::{refuse, require_context};
use crate::KERNELS;

/// What can be chosen of a [`GemmAllReduce`], the same on every rank.
///
/// ```no_run
/// # use devcomm::{Communicator, GemmAllReduce, Result, Stream, kernels::GemmForm};
/// # fn f(comm: &Communicator, stream: &Stream) -> Result<()> {
/// let gemm = GemmAllReduce::options().form(GemmForm::Mma).build(comm, stream, 1000, 4096)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options make nothing before `build`"]
pub struct GemmOptions {
    form: Option<GemmForm>,
    max_blocks: Option<NonZeroU32>,
}

impl GemmOptions {
    /// The defaults.
    pub const fn new() -> Self {
        Self { form: None, max_blocks: None }
    }

    /// This form of the kernel and no other. The default is the fastest that the GPUs of all ranks
    /// run.
    pub const fn form(mut self, form: GemmForm) -> Self {
        self.form = Some(form);
        self
    }

    /// At most that many blocks, which leaves multiprocessors to other kernels. The default is as
    /// many as the smallest GPU holds at once.
    pub const fn max_blocks(mut self, blocks: NonZeroU32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// As [`GemmAllReduce::new`].
    ///
    /// # Errors
    ///
    /// As [`GemmAllReduce::new`], and
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) for a form that this GPU
    /// does not run.
    pub fn build(
        self,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<GemmAllReduce> {
        GemmAllReduce::build(Plan::new(self, comm, stream, m, n)?, comm, stream)
    }

    /// How many blocks of a form run at once.
    fn blocks<K: Kernel>(self, compiled: &Kernels, form: GemmForm) -> Result<u32> {
        let resident = compiled.resident_blocks::<K>(form.threads(), form.dynamic_shared())?;
        Ok(self.max_blocks.map_or(resident, |most| resident.min(most.get())))
    }
}

/// The kernels of this operation among [`KERNELS`]: no others are loaded for it.
static MODULES: LazyLock<Vec<ModuleSource>> = LazyLock::new(|| {
    let files = [kernels::gemm_allreduce_wgmma::FILE, kernels::gemm_allreduce_mma::FILE];
    KERNELS.modules.iter().filter(|(name, ..)| files.contains(name)).copied().collect()
});

fn load(comm: &Communicator) -> Result<Kernels> {
    let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
    Kernels::load(comm.context(), &set)
}

/// What all ranks have agreed on.
pub(super) struct Plan {
    pub(super) compiled: Kernels,
    pub(super) form: GemmForm,
    pub(super) blocks: u32,
    pub(super) workspace: GemmWorkspace,
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
        // No rank leaves before it has told the others that it does.
        let told = mine.as_ref().map_or(&[][..], |(_, proposal)| slice::from_ref(proposal));
        let all = comm.host_all_gather(told)?;
        let (compiled, _) = mine?;
        let (form, blocks) = agree(&all)?;
        let Some(workspace) = form.workspace(m, n, comm.n_ranks()) else {
            return refuse(format!("a product of {m} x {n} elements is too large to be counted"));
        };
        Ok(Self { compiled, form, blocks, workspace })
    }
}

/// What a rank asks for and can do. One that refuses tells the others nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
struct Proposal {
    form: u64,
    m: u64,
    n: u64,
    /// Blocks of Hopper's form and of the portable one that run at once; 0 of a form that is not
    /// asked for, or does not run here.
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
            return refuse(format!("a product of {m} x {n} elements has none"));
        }
        let (form, compiled) = (options.form, load(comm)?);
        let hopper = compiled.info::<kernels::gemm_allreduce_wgmma>().is_ok();
        let wgmma = match form {
            Some(GemmForm::Mma) => 0,
            None if !hopper => 0,
            _ => options.blocks::<kernels::gemm_allreduce_wgmma>(&compiled, GemmForm::Wgmma)?,
        };
        let mma = match form {
            Some(GemmForm::Wgmma) => 0,
            _ => options.blocks::<kernels::gemm_allreduce_mma>(&compiled, GemmForm::Mma)?,
        };
        let proposal = Self { form: code(form), m: m as u64, n: n as u64, blocks: [wgmma, mma] };
        Ok((compiled, proposal))
    }
}

/// How a form is told to the other ranks; no form is any.
fn code(form: Option<GemmForm>) -> u64 {
    form.map_or(0, |form| 1 + form as u64)
}

/// The form and the blocks that all ranks take: Hopper's where all have it and none asks for
/// another, and as many blocks as the smallest GPU holds.
fn agree(all: &[Vec<Proposal>]) -> Result<(GemmForm, u32)> {
    let first = all.first().and_then(|proposal| proposal.first());
    let mut blocks = [u32::MAX; 2];
    for (rank, proposal) in all.iter().enumerate() {
        let [proposal] = proposal[..] else {
            return refuse(format!("rank {rank} cannot take part: its own error says why"));
        };
        if first.is_some_and(|f| (f.form, f.m, f.n) != (proposal.form, proposal.m, proposal.n)) {
            return refuse(format!(
                "rank {rank} asks for another form or other sizes than rank 0: all ask for the same"
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
    use super::super::check::tests::message;
    use super::*;

    #[test]
    fn both_forms_are_among_the_shipped_kernels_when_those_are_compiled() {
        let forms = if KERNELS.unavailable.is_none() { 2 } else { 0 };
        assert_eq!(MODULES.len(), forms);
    }

    #[test]
    fn ranks_agree_on_what_all_can_do_or_say_who_differs() {
        let proposal = |form, n, blocks| vec![Proposal { form: code(form), m: 7, n, blocks }];
        let hopper = proposal(None, 9, [132, 264]);
        let other = proposal(None, 9, [0, 100]);
        assert_eq!(agree(&[hopper.clone(), hopper.clone()]).unwrap(), (GemmForm::Wgmma, 132));
        assert_eq!(agree(&[hopper.clone(), other]).unwrap(), (GemmForm::Mma, 100));
        let mma = proposal(Some(GemmForm::Mma), 9, [0, 264]);
        assert_eq!(agree(&[mma.clone(), mma.clone()]).unwrap(), (GemmForm::Mma, 264));
        assert!(message(agree(&[hopper.clone(), mma])).contains("rank 1 asks for another form"));
        let larger = proposal(None, 10, [132, 264]);
        assert!(message(agree(&[hopper.clone(), larger])).contains("rank 1 asks"));
        assert!(message(agree(&[vec![], hopper])).contains("rank 0 cannot take part"));
    }
}
