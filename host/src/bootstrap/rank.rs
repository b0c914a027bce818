//! One rank of a world, as its function sees it.

use std::cell::OnceCell;

use super::Rendezvous;
use crate::{
    CommConfig, Communicator, Context, Error, KernelSet, Kernels, Library, Result, Stream, UniqueId,
};

/// One rank: its GPU, its way to the other ranks, its communicator.
///
/// [`World::run`](crate::World::run) makes it. Methods marked *collective* are called by every rank, in the same order.
pub struct Rank {
    // In order of dropping: the communicator needs the context.
    communicator: OnceCell<Communicator>,
    context: Context,
    library: Library,
    rendezvous: Rendezvous,
    local_rank: usize,
}

impl Rank {
    pub(crate) fn new(
        rendezvous: Rendezvous,
        library: Library,
        local_rank: usize,
        device: usize,
    ) -> Result<Self> {
        let context = Context::with_health(device, rendezvous.health().clone())?;
        Ok(Self { communicator: OnceCell::new(), context, library, rendezvous, local_rank })
    }

    /// This rank, below [`n_ranks`](Self::n_ranks).
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rendezvous.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        self.rendezvous.n_ranks()
    }

    /// This rank's place among those of its machine.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The ordinal of this rank's GPU among the visible ones.
    #[must_use]
    pub fn device(&self) -> usize {
        self.context.ordinal()
    }

    /// Whether its GPU is a simulated one: nothing that takes time there says anything about GPUs.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.context.machine().is_simulated()
    }

    /// Whether this is rank 0, the one that prints.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// The hosts of all ranks, in order of ranks.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        self.rendezvous.hosts()
    }

    /// This rank's GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The NCCL in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// The communicator of all ranks, made at the first call. The first call is *collective*.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`], [`Error::Nccl`].
    pub fn communicator(&self) -> Result<&Communicator> {
        if let Some(communicator) = self.communicator.get() {
            return Ok(communicator);
        }
        let communicator = self.new_communicator(&CommConfig::new())?;
        Ok(self.communicator.get_or_init(|| communicator))
    }

    /// Another communicator of all ranks, with a configuration that is the same on every rank. *Collective*.
    ///
    /// # Errors
    ///
    /// As [`Communicator::init_rank`].
    pub fn new_communicator(&self, config: &CommConfig) -> Result<Communicator> {
        let own = if self.is_root() { Some(self.library.unique_id()?) } else { None };
        let bytes = own.as_ref().map_or(&[][..], |id| &id.as_bytes()[..]);
        // Nobody enters NCCL, where a missing rank is waited for without end, before all are here.
        let bytes = self.broadcast(0, bytes)?;
        let id = UniqueId::from_bytes(&bytes)
            .ok_or_else(|| Error::invalid("rank 0 sent something else than NCCL's unique id"))?;
        let (rank, n_ranks) = (self.rank(), self.n_ranks());
        let rendezvous = Some(self.rendezvous.clone());
        Communicator::join(&self.library, &self.context, &[id], rank, n_ranks, config, rendezvous)
    }

    /// Loads a program's kernels on this rank's GPU.
    ///
    /// # Errors
    ///
    /// As [`Kernels::load`].
    pub fn load(&self, set: &KernelSet) -> Result<Kernels> {
        Kernels::load(&self.context, set)
    }

    /// A new stream on this rank's GPU.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stream(&self) -> Result<Stream> {
        self.context.stream()
    }

    /// Waits until every rank is here; the GPUs are not waited for. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`].
    pub fn barrier(&self) -> Result<()> {
        self.rendezvous.barrier()
    }

    /// Gives `bytes` to every rank and gets what each gave, in order of ranks; lengths may differ. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`]; [`Error::InvalidInput`] when all ranks together give more than 64 MiB.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.rendezvous.all_gather(bytes).map(|all| all.as_ref().clone())
    }

    /// Gives every rank the bytes of rank `root`; the others' do not matter. *Collective*.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather).
    pub fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        self.rendezvous.broadcast(root, bytes)
    }
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rank({} of {}, GPU {})", self.rank(), self.n_ranks(), self.device())
    }
}
