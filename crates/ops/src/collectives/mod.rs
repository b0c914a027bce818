//! Collectives by load and store, with NCCL's for what these do not reach.

/// Expands `$launch!` for a type of floats.
macro_rules! of_floats {
    ($data_type:expr, $launch:ident) => {
        match $data_type {
            DataType::Float32 => $launch!(f32),
            DataType::Float16 => $launch!(f16),
            _ => $launch!(bf16),
        }
    };
}

mod all_reduce;
mod exchange;
mod reduce_scatter;
mod rmsnorm;

use std::cell::RefCell;
use std::sync::LazyLock;

use devcomm_host::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, DeviceSlice, KernelSet, Kernels,
    LaunchConfig, ModuleSource, Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::push_allreduce;
use devcomm_types::Kernel;
use nccl_device::{EMPTY, Lamport, LamportSlots};

use self::all_reduce::most_pushed;
use crate::check::require_context;
use crate::{KERNELS, modules};

/// Collectives on a communicator: by kernels where load and store reach all ranks, and by NCCL.
///
/// As with a [`Communicator`], every rank calls the same operations in the same order, with buffers
/// of the same lengths and types. All are at the same place of a window or all in none, and all
/// begin at a multiple of 16 bytes or none does. Launches are dependent ones. Only work on the
/// operation's stream may access its buffers until it has ended. During a stream capture all
/// operations are on the captured stream, also the last one before.
///
/// ```no_run
/// use devcomm::{Collectives, ReduceOp, World};
///
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     let gradients = comm.window::<f32>(1 << 20)?;
///     let collectives = Collectives::new(comm)?;
///     collectives.all_reduce(&gradients, &gradients, ReduceOp::Sum, &stream)?;
///     stream.synchronize()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct Collectives {
    communicator: Communicator,
    compiled: Kernels,
    /// `None` where load and store do not reach all ranks.
    workspace: Option<Workspace>,
    /// The stream of the last launch: the workspace is used by one launch at a time.
    last: RefCell<Option<Stream>>,
}

/// The memory that ranks send to.
struct Workspace {
    dev_comm: DevCommResource,
    options: CollectivesOptions,
    slots: Window<u32>,
    slots_state: SymmetricBuffer<u32>,
    inbox: Window<u32>,
}

/// Options of [`Collectives`], the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing before `build`"]
pub struct CollectivesOptions {
    lamport_bytes: Option<usize>,
    push_blocks: u32,
}

impl CollectivesOptions {
    /// The default options.
    pub const fn new() -> Self {
        Self { lamport_bytes: None, push_blocks: 128 }
    }

    /// The longest message in bytes that is sent in one step; an all-reduce of two ranks may have
    /// four times as many. The workspace takes twice the most bytes for each rank. Default: 4 MiB
    /// for 2 ranks, 1 MiB for 4, 512 KiB for 8.
    pub const fn lamport_bytes(self, bytes: usize) -> Self {
        Self { lamport_bytes: Some(bytes), ..self }
    }

    /// The blocks that push or load long messages. Default: 128.
    pub const fn push_blocks(self, blocks: u32) -> Self {
        Self { push_blocks: blocks, ..self }
    }

    /// Creates the collectives, as [`Collectives::new`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn build(self, comm: &Communicator) -> Result<Collectives> {
        let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
        let compiled = Kernels::load(comm.context(), &set)?;
        let reaches = matches!(comm.n_ranks(), 2 | 4 | 8) && comm.require_single_lsa_team().is_ok();
        let workspace = reaches.then(|| Workspace::new(comm, self)).transpose()?;
        Ok(Collectives {
            communicator: comm.clone(),
            compiled,
            workspace,
            last: RefCell::default(),
        })
    }

    /// Slots for vectors from each rank.
    fn capacity(self, ranks: usize) -> usize {
        if ranks == 2 { 4 * self.slots(ranks) } else { self.slots(ranks) }
    }

    /// The most vectors of a message that is sent in one step.
    fn slots(self, ranks: usize) -> usize {
        let default = match ranks {
            2 => 4 << 20,
            4 => 1 << 20,
            _ => 512 << 10,
        };
        self.lamport_bytes.unwrap_or(default) / 16
    }
}

impl Default for CollectivesOptions {
    fn default() -> Self {
        Self::new()
    }
}

static MODULES: LazyLock<Vec<ModuleSource>> = LazyLock::new(|| {
    modules(&[
        kernels::lamport_allreduce::<f32>::FILE,
        kernels::lamport_exchange::<u32>::FILE,
        kernels::lamport_reduce_scatter::<f32>::FILE,
        kernels::lamport_rmsnorm::<f32>::FILE,
        kernels::pull_reduce_scatter::<f32>::FILE,
        kernels::push_allreduce::<f32>::FILE,
        kernels::push_exchange::FILE,
        kernels::rmsnorm::<f32>::FILE,
    ])
});

/// How a collective is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// In one step, by messages that are their own flags.
    Lamport,
    /// By stores to the peers; an all-reduce in two steps, to the ranks that reduce and from them.
    Push,
    /// By loads from the peers.
    Pull,
    /// By NCCL.
    Nccl,
}

/// Threads of a block that pushes or loads long messages.
const THREADS: u32 = 512;

impl Collectives {
    /// For collectives of this communicator. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of loading kernels, and of creating windows and a device communicator.
    pub fn new(comm: &Communicator) -> Result<Self> {
        CollectivesOptions::new().build(comm)
    }

    /// Fails unless the stream and the buffers are of the communicator's context.
    fn require_own<T>(
        &self,
        send: Option<&DeviceSlice<T>>,
        recv: &DeviceSlice<T>,
        stream: &Stream,
    ) -> Result<()> {
        let own = self.communicator.context();
        require_context("the stream", stream.context(), own)?;
        if let Some(send) = send {
            require_context("the buffer to send", send.context(), own)?;
        }
        require_context("the buffer to receive in", recv.context(), own)
    }

    /// The grid for Lamport messages that use this many slots of each rank.
    fn lamport_config(&self, slots: u32, stream: &Stream) -> LaunchConfig {
        let threads = match slots {
            0..=64 => 64,
            65..=4096 => 128,
            4097..=16384 => 256,
            _ => 512,
        };
        let blocks = slots.div_ceil(threads).min(stream.context().limits().multiprocessors);
        LaunchConfig::new(blocks, threads).with_dependent()
    }

    /// Orders this launch behind the last one, if that was on another stream.
    fn order(&self, stream: &Stream) -> Result<()> {
        let mut last = self.last.borrow_mut();
        if let Some(last) = last.as_ref().filter(|last| last.as_raw() != stream.as_raw()) {
            let event = stream.context().event_without_timing()?;
            last.record(&event)?;
            stream.wait_event(&event)?;
        }
        *last = Some(stream.clone());
        Ok(())
    }
}

impl Workspace {
    fn new(comm: &Communicator, options: CollectivesOptions) -> Result<Self> {
        let (ranks, blocks) = (comm.n_ranks(), options.push_blocks);
        let words = ranks * LamportSlots::<1>::words(options.capacity(ranks));
        let slots = comm.window::<u32>(words)?;
        let empty = vec![EMPTY; words.min(1 << 16)];
        for first in (0..words).step_by(empty.len()) {
            let part = slots.slice(first..words.min(first + empty.len()))?;
            part.copy_from_host(&empty[..part.len()])?;
        }
        let slots_state = comm.mem_alloc::<u32>(Lamport::<1>::STATE)?;
        slots_state.fill_bytes(0)?;
        let workspace = Self {
            dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            options,
            slots,
            slots_state,
            inbox: comm.window(push_allreduce::inbox(ranks, blocks, most_pushed(ranks)))?,
        };
        // No rank sends before all slots are empty.
        comm.barrier()?;
        Ok(workspace)
    }
}

impl std::fmt::Debug for Collectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Collectives({} ranks)", self.communicator.n_ranks())
    }
}
