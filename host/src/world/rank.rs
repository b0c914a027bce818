//! One rank of a world, the argument of the function that a world runs.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;

use super::rendezvous::Rendezvous;
use crate::communicator::peers::{self, NEVER, Peers, Terms};
use crate::communicator::{CommConfig, Communicator, Library, UniqueId};
use crate::device::in_group::refuse_inside;
use crate::device::{Context, KernelSet, PostponedDrops, Stream};
use crate::error::{Error, Result};
use crate::machine::CallLock;

/// One rank: its GPU, its connection to the other ranks, its communicator.
///
/// [`World::run`](crate::World::run) makes it. Every rank must call the methods marked
/// *collective*, in the same order.
pub struct Rank {
    // Fields are dropped in this order, since the communicator needs the context.
    /// Ends what the rank's function has dropped, which is postponed until that has ended, when the
    /// other ranks know whether it failed. `None` for a rank from [`shrink`](Self::shrink): that of
    /// the world's rank, which has the same context, postpones its drops.
    _drops: Option<PostponedDrops>,
    communicator: OnceLock<Communicator>,
    /// Held while the communicator is created.
    making: CallLock,
    context: Context,
    library: Library,
    rendezvous: Rendezvous,
    local_rank: usize,
    /// Whether this rank asks that ranks compare the arguments of each collective before it starts.
    /// They do if all ranks ask for it.
    checked: bool,
}

impl Rank {
    pub(crate) fn new(
        rendezvous: Rendezvous,
        library: Library,
        local_rank: usize,
        device: usize,
        checked: bool,
    ) -> Result<Self> {
        let context = Context::of_rank(
            device,
            rendezvous.health().clone(),
            Arc::clone(rendezvous.recorder()),
        )?;
        context.set_rank(rendezvous.rank());
        let (_drops, communicator) = (Some(context.postpone_drops()), OnceLock::new());
        let making = CallLock::default();
        Ok(Self { _drops, communicator, making, context, library, rendezvous, local_rank, checked })
    }

    /// Returns, after the loss of a rank, this rank in a world of the remaining ranks, all of which
    /// call this.
    ///
    /// Their order stays, and their numbers are 0, 1, ... again. The GPU's context, its streams,
    /// memory and loaded kernels go on; what a communicator of the old world had registered or made
    /// has ended with it, and so has this `Rank`. The function of [`World::run`](crate::World::run)
    /// ends when it has ended on all remaining ranks. Another loss can follow.
    ///
    /// A rank remains if its process runs and calls this within the time of the first rendezvous
    /// (`DEVCOMM_TIMEOUT`): the first of the ranks that are left within half of it, or else the
    /// next one takes its place. If ranks are threads, a rank remains if its function has not
    /// failed and calls this until the deadline of operations. A rank that calls this later gets an
    /// error; so does a rank that counts as lost and then continues, such as one that was stopped
    /// for a while. More than half of the processes must be left, or half of them: with rank 0, or
    /// when the host of rank 0 says that its process has ended. Local jobs end when a rank fails,
    /// unless [`LocalJob::survive`](crate::LocalJob::survive) says otherwise.
    ///
    /// ```no_run
    /// use devcomm_host::{Error, Rank, Result, WorldError};
    ///
    /// fn train(rank: &Rank, steps: &mut std::ops::Range<usize>) -> Result<()> {
    ///     match run_steps(rank, steps) {
    ///         Err(Error::World(WorldError::RankLost { .. })) => train(&rank.shrink()?, steps),
    ///         done => done,
    ///     }
    /// }
    /// # fn run_steps(rank: &Rank, steps: &mut std::ops::Range<usize>) -> Result<()> { Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if no rank is lost, for a second call, or if the other ranks have
    /// gone on without this one; [`WorldError::RankLost`](crate::WorldError::RankLost) if this rank
    /// is the lost one; [`WorldError::Rendezvous`](crate::WorldError::Rendezvous) if the ranks do
    /// not meet, or too few are left; [`StateError`](crate::StateError)s in a group or a capture,
    /// and when the GPU does not become idle after the communicators were aborted.
    pub fn shrink(&self) -> Result<Self> {
        refuse_inside("going on after a loss")?;
        self.context.refuse_capturing("ranks go on after a loss")?;
        // Checked before the abort, which would end the communicators of a world without a loss.
        // `survivors` calls it again, to learn which rank is lost.
        self.rendezvous.require_loss()?;
        // Communicators are aborted, since their kernels would wait for the lost rank.
        self.rendezvous.health().start_aborts();
        let rendezvous = self.rendezvous.survivors()?;
        self.context.enter_world(rendezvous.health(), rendezvous.rank())?;
        let (context, library) = (self.context.clone(), self.library.clone());
        let (communicator, making) = (OnceLock::new(), CallLock::default());
        let (local_rank, checked) = (self.local_rank, self.checked);
        let _drops = None;
        Ok(Self { _drops, communicator, making, context, library, rendezvous, local_rank, checked })
    }

    /// Returns the number of this rank, below [`n_ranks`](Self::n_ranks).
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rendezvous.rank()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        self.rendezvous.n_ranks()
    }

    /// Returns this rank's number among the ranks of its host, by which it has its GPU. It stays
    /// the same after a [`shrink`](Self::shrink).
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Returns the ordinal of this rank's GPU among the visible GPUs.
    #[must_use]
    pub fn device(&self) -> usize {
        self.context.ordinal()
    }

    /// Returns whether its GPU is simulated. Times measured there tell nothing about GPUs.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.context.is_simulated()
    }

    /// Does the same as [`World::simulated_machine`](crate::World::simulated_machine).
    #[cfg(feature = "simulator")]
    #[must_use]
    pub fn simulated_machine(&self) -> Option<&devcomm_sim::Machine> {
        self.context.machine().simulated()
    }

    /// Returns whether this is rank 0, by convention the one that prints.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the host names of all ranks, by rank.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        self.rendezvous.hosts()
    }

    /// Returns this rank's GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the NCCL library in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// Returns the communicator of all ranks, which the first call makes. The first call is
    /// *collective*.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
    pub fn communicator(&self) -> Result<&Communicator> {
        if let Some(communicator) = self.communicator.get() {
            return Ok(communicator);
        }
        let health = self.rendezvous.health();
        let _making = self.making.lock(health.machine(), None, || health.check())?;
        if let Some(communicator) = self.communicator.get() {
            return Ok(communicator);
        }
        let communicator = self.new_communicator(&CommConfig::new())?;
        Ok(self.communicator.get_or_init(|| communicator))
    }

    /// Creates another communicator of all ranks, with a configuration that is the same on every
    /// rank. *Collective*.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Communicator::init_rank`].
    pub fn new_communicator(&self, config: &CommConfig) -> Result<Communicator> {
        self.rendezvous.health().check()?;
        let own = || {
            config.lower(self.library.loaded())?;
            if self.is_root() { self.library.unique_id().map(Some) } else { Ok(None) }
        };
        let own = own();
        let id = own.as_ref().ok().and_then(Option::as_ref);
        let id = id.map_or(&[][..], |id| &id.as_bytes()[..]);
        // NCCL waits for a missing rank forever: no rank calls NCCL before all have arrived here.
        // A byte of `checked`, and rank 0's unique id; other ranks send none.
        let mine = [&[u8::from(self.checked)], id].concat();
        let (options, failure) = (config.describe(), own.as_ref().err());
        let terms = Terms { call: "new_communicator", options: &options, failure };
        let all = peers::all_gather(&self.rendezvous, terms, &mine, NEVER);
        own?;
        let all = all?;
        let id = all.first().and_then(|bytes| UniqueId::from_bytes(bytes.get(1..)?));
        let id = id.ok_or_else(|| Error::invalid("rank 0 sent no valid NCCL unique id"))?;
        let checked = all.iter().all(|bytes| bytes.first() == Some(&1));
        let (rank, n_ranks) = (self.rank(), self.n_ranks());
        // Each communicator has a subset of its own, so that threads with different communicators
        // can exchange at the same time.
        let members: Vec<usize> = (0..n_ranks).collect();
        let peers: Arc<dyn Peers> = Arc::new(self.rendezvous.subset(&members)?.checked(checked));
        Communicator::join(&self.library, &self.context, &[id], rank, n_ranks, config, Some(peers))
    }

    /// Returns a communicator that another library made of the ranks of this world, in their order,
    /// such as PyTorch's of its default group. Its ranks compare requirements and notice a lost
    /// rank over the connections of this world. They do not compare operations, in a checked world
    /// either: the other library may enqueue some, too. Otherwise the same as
    /// [`Communicator::from_raw`]. *Collective*.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Communicator::from_raw`].
    ///
    /// # Errors
    ///
    /// The errors are those of [`Communicator::from_raw`]; [`Error::InvalidInput`] if the
    /// communicator has other ranks.
    pub unsafe fn communicator_from_raw(&self, raw: *mut c_void) -> Result<Communicator> {
        let peers = |rank, n_ranks| {
            if (rank, n_ranks) != (self.rank(), self.n_ranks()) {
                return Err(Error::invalid(format!(
                    "the communicator has rank {rank} of {n_ranks} here, and the world rank {} of \
                     {}",
                    self.rank(),
                    self.n_ranks()
                )));
            }
            let all: Vec<usize> = (0..n_ranks).collect();
            Ok(Some(Arc::new(self.rendezvous.subset(&all)?) as Arc<dyn Peers>))
        };
        // SAFETY: the caller passes a communicator of NCCL's that outlives this one.
        unsafe { Communicator::adopt_raw(&self.library, &self.context, raw, peers) }
    }

    /// Loads a program's kernels on this rank's GPU, for launches to its streams.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Context::load`].
    pub fn load(&self, set: &KernelSet) -> Result<()> {
        self.context.load(set)
    }

    /// Returns a new stream on this rank's GPU.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn stream(&self) -> Result<Stream> {
        self.context.stream()
    }

    /// Returns the default stream of this rank's GPU; see [`Context::default_stream`].
    #[must_use]
    pub fn default_stream(&self) -> Stream {
        self.context.default_stream()
    }

    /// Waits until every rank has called this. It does not wait for the GPUs. *Collective*.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost).
    pub fn barrier(&self) -> Result<()> {
        self.rendezvous.barrier()
    }

    /// Gathers the `values` of every rank, on the host; the result is in order of ranks. The number
    /// of values may differ between ranks, the type may not. *Collective*.
    ///
    /// ```no_run
    /// # fn f(rank: &devcomm_host::Rank, elapsed: f64) -> devcomm_host::Result<()> {
    /// let slowest = rank.all_gather(&[elapsed])?.concat().into_iter().fold(0.0, f64::max);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); [`Error::InvalidInput`] when this
    /// rank's values do not fit into its part of 64 MiB, which the ranks share equally, for which
    /// the others get [`WorldError::CallFailed`](crate::WorldError::CallFailed); or when a rank's
    /// bytes are not values of this type.
    pub fn all_gather<T: Pod>(&self, values: &[T]) -> Result<Vec<Vec<T>>> {
        peers::all_gather(&self.rendezvous, "all_gather", values, NEVER)
    }

    /// Returns the values of rank `root` on every rank; those of other ranks are ignored.
    /// *Collective*.
    ///
    /// # Errors
    ///
    /// The errors are those of [`all_gather`](Self::all_gather).
    pub fn broadcast<T: Pod>(&self, root: usize, values: &[T]) -> Result<Vec<T>> {
        let bytes = self.rendezvous.broadcast(root, bytemuck::cast_slice(values))?;
        peers::read(root, &bytes)
    }
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rank({} of {}, GPU {})", self.rank(), self.n_ranks(), self.device())
    }
}
