//! Collectives by load and store, or by NCCL where ranks cannot reach each other in this way.

mod all_to_all_v;
mod call;
mod exchange;
mod kernel_reduction;
mod plan;
mod reduce;
mod rmsnorm;
mod smallest;

use std::sync::Arc;

use devcomm_kernels::collectives::push_allreduce;

pub use self::all_to_all_v::Parts;
pub use self::call::Collective;
pub use self::plan::{Algorithm, CollectiveKind, CollectivePlan};
use self::plan::{Request, Table};
use self::reduce::most_pushed;
use self::smallest::SmallestGpu;
use crate::prelude::*;

/// Collectives on a communicator: by kernels where load and store reach all ranks, and otherwise by
/// NCCL.
///
/// The kernels need 2, 4 or 8 ranks, all on Hopper GPUs or newer ones. With another number of
/// ranks, or if any GPU is older (Ampere is the minimum), NCCL does all operations.
///
/// As with a [`Communicator`], every rank calls the same operations in the same order, with buffers
/// of the same lengths and types. A buffer is at the same offset of the same window on all ranks,
/// or in a window on none; it begins at a multiple of 16 bytes on all ranks or on none.
/// Elements that are moved keep their bits, and [`ReduceOp`](devcomm_host::ReduceOp) says how NaNs
/// and zeros are reduced. Kernels are launched with programmatic dependent launch. Only work on the
/// operation's stream may access its buffers until the operation has ended.
///
/// Operations may be on several streams, captured or not: each follows the one before, and so does
/// the launch of a [graph](devcomm_host::Graph) with operations. A graph of another library is
/// ordered with them by the program. The operations of up to [`CollectivesOptions::concurrent`]
/// `Collectives` (2 by default) may be called in a different order on each rank, if kernels and not
/// NCCL do them. With more of them, the order is the same on all ranks.
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
    /// `None` where load and store do not reach all ranks, or a GPU is older than Hopper.
    workspace: Option<Workspace>,
    /// Whether a rank's GPU is older than Hopper: then `compiled` are the [`PORTABLE`] kernels.
    is_older: bool,
    /// What all plans depend on, so that the ranks have the same ones.
    smallest: SmallestGpu,
    order: Arc<StreamOrder>,
    table: Table,
    plan: Cell<Option<CollectivePlan>>,
}

/// The memory that ranks send to.
struct Workspace {
    dev_comm: DevCommResource,
    options: CollectivesOptions,
    memory: LamportMemory,
    /// Where `push_allreduce` receives.
    inbox: Window<u32>,
    /// Two numbers of each peer in an `all_to_all_v`: where this rank's long message goes, and its
    /// length.
    offers: SymmetricBuffer<u64>,
    /// A flag for each rank and block: whether the rank's long message has arrived.
    arrived: Window<u32>,
    /// The most threads on a multiprocessor of any rank's GPU.
    most_resident: u32,
}

/// Blocks that push or load long messages. If a GPU has fewer multiprocessors, it is their number.
const PUSH_BLOCKS: u32 = 128;

/// Options of [`Collectives`], the same on every rank. With [`lamport_bytes`](Self::lamport_bytes)
/// or [`push_blocks`](Self::push_blocks), the measured plans are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "options do nothing before `build`"]
pub struct CollectivesOptions {
    lamport_bytes: Option<usize>,
    push_blocks: Option<u32>,
    concurrent: u32,
}

impl CollectivesOptions {
    /// Returns the default options.
    pub const fn new() -> Self {
        Self { lamport_bytes: None, push_blocks: None, concurrent: 2 }
    }

    /// Sets the longest message in bytes that is sent in one step; that of an all-reduce of two
    /// ranks may be sixteen times as long. The workspace has room for two of the longest messages
    /// of each rank (of two ranks, of the other one), and by default up to 32 MiB more for
    /// [`push_blocks`](Self::push_blocks). Default: 4 MiB for 2 ranks (128 MiB for messages), 1 MiB
    /// for 4, 512 KiB for 8.
    pub const fn lamport_bytes(self, bytes: usize) -> Self {
        Self { lamport_bytes: Some(bytes), ..self }
    }

    /// Sets the blocks that push or load long messages; at most one for each multiprocessor, except
    /// with [`concurrent(1)`](Self::concurrent). Default: 128, or fewer if a rank's GPU has fewer
    /// multiprocessors.
    pub const fn push_blocks(self, blocks: u32) -> Self {
        Self { push_blocks: Some(blocks), ..self }
    }

    /// Sets the number of `Collectives`, 1 to 4, whose operations may run on a GPU at the same
    /// time, on streams of their own and called in a different order on each rank. Each of them
    /// uses at most its share of each multiprocessor; with 1, an operation may fill the GPU.
    /// Operations of more `Collectives` wait for each other in the order of the host's calls, which
    /// then must be the same on all ranks. Default: 2.
    pub const fn concurrent(self, objects: u32) -> Self {
        Self { concurrent: objects, ..self }
    }

    /// Creates the collectives, as [`Collectives::new`] does.
    pub fn build(self, comm: &Communicator) -> Result<Collectives> {
        let built = self.build_in(comm, None)?;
        comm.name(&built.order, "Collectives");
        Ok(built)
    }

    /// Creates the collectives. With an `order` they are part of the product that has it, whose
    /// launches they follow, and never do RMSNorm. *Collective*.
    pub(crate) fn build_in(
        self,
        comm: &Communicator,
        order: Option<Arc<StreamOrder>>,
    ) -> Result<Collectives> {
        // Destructured, so that a new option cannot be forgotten here.
        let Self { lamport_bytes, push_blocks, concurrent } = self;
        let call = comm.collective(NAME).option("lamport_bytes", or_default(lamport_bytes));
        let call = call.option("push_blocks", or_default(push_blocks));
        let call = call.option("concurrent", concurrent);
        let own = || {
            refuse_if!(
                !(1..=4).contains(&concurrent),
                "Collectives of {concurrent} objects at a time: it is 1 to 4"
            );
            refuse_if!(push_blocks == Some(0), "push_blocks: no blocks push or load long messages");
            let most = self.all_reduce_slots(comm.n_ranks());
            refuse_if!(
                most > MOST_SLOTS,
                "lamport_bytes: a message of {most} vectors of 16 bytes, and not at most \
                 {MOST_SLOTS}"
            );
            let is_older = comm.context().limits().compute_capability < HOPPER;
            let compiled = load(comm, is_older)?;
            let all_reach = matches!(comm.n_ranks(), 2 | 4 | 8) && is_single_lsa_team(comm)?;
            let name = comm.context().device_name()?;
            let [a, b, c] = SmallestGpu::numbers(comm.context());
            let gpu = [hash(&name), is_older.into(), a, b, c];
            Ok(((compiled, all_reach, name), gpu))
        };
        comm.together(NAME, || {
            let ((compiled, all_reach, name), gpus) = match own() {
                // NCCL does everything: ranks that cannot exchange on the host need not agree.
                Ok((own @ (_, false, _), gpu)) if !comm.has_peers() => (own, vec![gpu]),
                own => call.agree(own)?,
            };
            // All ranks do the same, by the same kernels, if one of them has an older GPU.
            let is_older = gpus.iter().any(|[_, is_older, ..]| *is_older == 1);
            let compiled = if is_older { load(comm, true)? } else { compiled };
            let all_reach = all_reach && !is_older;
            let mut smallest = SmallestGpu::of(gpus.iter().map(|[.., a, b, c]| [*a, *b, *c]));
            if all_reach && concurrent == 1 && order.is_none() {
                smallest.agree_on_clusters(comm, &compiled)?;
            }
            // All of these blocks run at the same time: by default, and in a share of the GPU
            // whatever number is asked for, there is at most one on a multiprocessor.
            let is_bounded = push_blocks.is_none() || concurrent > 1;
            let most = if is_bounded { smallest.multiprocessors } else { u32::MAX };
            let resolved = self.push_blocks(push_blocks.unwrap_or(PUSH_BLOCKS).min(most));
            let workspace = || Workspace::new(comm, resolved, smallest.threads);
            let workspace = all_reach.then(workspace).transpose()?;
            // GPUs of several kinds have different tables.
            let is_one_kind = gpus.iter().all(|[name, ..]| *name == gpus[0][0]);
            let has_default_plans = lamport_bytes.is_none() && push_blocks.is_none();
            let is_measured = has_default_plans && all_reach && is_one_kind;
            let table = is_measured.then(|| Table::of(&name, comm.n_ranks()));
            let new_order = || StreamOrder::concurrent(comm.context(), concurrent).map(Arc::new);
            Ok(Collectives {
                communicator: comm.clone(),
                compiled,
                workspace,
                is_older,
                smallest,
                order: order.map_or_else(new_order, Ok)?,
                table: table.unwrap_or_default(),
                plan: Cell::default(),
            })
        })
    }

    /// Returns the blocks that push or load, which `build` has set in a workspace's options.
    fn blocks(self) -> u32 {
        self.push_blocks.unwrap_or(PUSH_BLOCKS)
    }

    /// Returns a block's most threads; a multiprocessor has room for `room` of such threads.
    ///
    /// If several objects run at a time, each may have two launches on the GPU: one that runs and,
    /// by dependent launch, the next one, which waits. A block of each of these launches fits on
    /// each multiprocessor, and a launch has at most as many blocks as there are multiprocessors:
    /// so there is always room for the blocks that have not begun.
    pub(super) fn threads(self, room: u32) -> u32 {
        let launches = if self.concurrent == 1 { 1 } else { 2 * self.concurrent };
        (room / launches / 32 * 32).min(THREADS)
    }

    /// Returns the most blocks of a launch: `each` for each multiprocessor if operations may fill
    /// the GPU, and otherwise one.
    fn most_blocks(self, each: u32, multiprocessors: u32) -> u32 {
        if self.concurrent == 1 { each * multiprocessors } else { multiprocessors }
    }

    /// Returns the most vectors of an all-reduce that is done in one step.
    fn all_reduce_slots(self, ranks: usize) -> usize {
        if ranks == 2 { 16 * self.slots(ranks) } else { self.slots(ranks) }
    }

    /// Returns the most vectors of a message that is sent in one step.
    fn slots(self, ranks: usize) -> usize {
        let default = match ranks {
            2 => 4 << 20,
            4 => 1 << 20,
            _ => 512 << 10,
        };
        self.lamport_bytes.unwrap_or(default) / 16
    }

    /// Returns the shape of a dependent launch.
    fn config(self, plan: CollectivePlan) -> LaunchConfig {
        self.independent(plan).with_dependent()
    }

    /// Returns the shape of a launch that is not dependent.
    ///
    /// The blocks of Lamport messages need not run at the same time: each one sends before it
    /// waits, and waits for the peers' blocks of its index. If several objects run at a time, all
    /// blocks of a launch have room, and a cooperative launch would wait for that of another
    /// object.
    fn independent(self, plan: CollectivePlan) -> LaunchConfig {
        let CollectivePlan { algorithm, blocks, threads } = plan;
        let config = LaunchConfig::new(blocks, threads);
        let is_cooperative = self.concurrent == 1 && algorithm != Algorithm::Lamport;
        if is_cooperative { config } else { config.without_cooperation() }
    }
}

impl Default for CollectivesOptions {
    fn default() -> Self {
        Self::new()
    }
}

const FILES: &[&str] = &[
    kernels::lamport_allreduce::<f32, 4>::FILE,
    kernels::lamport_allreduce_any::<i32>::FILE,
    kernels::lamport_exchange::<u32>::FILE,
    kernels::lamport_exchange_v::FILE,
    kernels::lamport_reduce_scatter::<f32>::FILE,
    kernels::lamport_rmsnorm::<f32>::FILE,
    kernels::lsa_allreduce::<f32>::FILE,
    kernels::pull_reduce_scatter::<f32>::FILE,
    kernels::push_allreduce::<f32>::FILE,
    kernels::push_exchange::FILE,
    kernels::push_exchange_v::FILE,
    kernels::rmsnorm::<f32>::FILE,
];

/// The kernels for GPUs older than Hopper.
const PORTABLE: &[&str] = &[kernels::rmsnorm_block::<f32>::FILE];

/// The compute capability of Hopper, which the other kernels need.
pub(crate) const HOPPER: (u32, u32) = (9, 0);

fn load(comm: &Communicator, is_older: bool) -> Result<Kernels> {
    Kernels::load(comm.context(), &KERNELS.only(if is_older { PORTABLE } else { FILES }))
}

/// The most threads of a block: as many as the kernels allow. With two blocks of 256 threads on a
/// multiprocessor instead of one, the first blocks of the next launch that pushes long messages
/// would share multiprocessors, and take 10 % longer.
const THREADS: u32 = 512;

/// Why NCCL does what no kernel can.
const UNREACHED: &str = "as there are not 2, 4 or 8 ranks that reach each other by load and store";
const OLDER: &str = "as a rank's GPU is older than Hopper";
const INVALID: &str = "as there is nothing to send, or the buffers do not match";
const UNREDUCED: &str = "as no kernel reduces this type by this operator";
const NOT_IN_WINDOW: &str = "as the message is too long for one step, and not aligned in a window";

const NAME: &str = "Collectives::new";

/// The most slots of a message: kernels count slots in 32 bits, also those that follow the last one
/// in the steps of a grid.
const MOST_SLOTS: usize = 1 << 31;

impl Collectives {
    /// Prepares collectives of this communicator. *Collective*: it fails on all ranks or on none.
    ///
    /// # Errors
    ///
    /// Those of loading kernels, such as
    /// [`LaunchError::WrongArch`](devcomm_host::LaunchError::WrongArch) on a GPU before Ampere;
    /// those of creating windows and a device communicator;
    /// [`WorldError::CallFailed`](devcomm_host::WorldError::CallFailed) if another rank fails;
    /// [`WorldError::OptionsDiffer`](devcomm_host::WorldError::OptionsDiffer) for ranks with
    /// different options.
    pub fn new(comm: &Communicator) -> Result<Self> {
        CollectivesOptions::new().build(comm)
    }

    /// Returns how a call of one of these methods would be done, and why. Nothing is launched.
    ///
    /// # Errors
    ///
    /// Those of the call that come before the choice, for example a buffer of another context.
    pub fn explain(&self, call: &Collective<'_>) -> Result<Explanation> {
        Ok((call.0)(self)?.0)
    }

    /// Returns the plans by which a call can be done, for [`set_plan`](Self::set_plan). The first
    /// one is taken if none is set. Errors are those of [`explain`](Self::explain).
    pub fn plans(&self, call: &Collective<'_>) -> Result<Vec<CollectivePlan>> {
        Ok((call.0)(self)?.1)
    }

    /// Uses this plan for every operation that it fits, with the blocks that its size needs, also
    /// for the all-reduce that RMSNorm follows. All-reduces with RMSNorm in one step, and
    /// [`all_to_all_v`](Self::all_to_all_v), have no other plan. `None` returns to the default
    /// choice. Every rank sets the same plan between the same operations.
    pub fn set_plan(&self, plan: Option<CollectivePlan>) {
        self.plan.set(plan);
    }

    /// Returns how an operation is done, and why.
    fn decide(&self, request: &Request) -> Explanation {
        let how = |reason| move |plan| Explanation { plan, reason };
        let set = self.plan.get().and_then(|plan| request.adapt(plan)).map(how("as it was set"));
        let measured = || self.table.find(request).map(how("as was fastest on this kind of GPU"));
        set.or_else(measured).unwrap_or_else(|| request.model())
    }

    fn unreached(&self) -> &'static str {
        if self.is_older { OLDER } else { UNREACHED }
    }

    /// Compares a kernel's operation with those of the other ranks, if the world
    /// [checks calls](devcomm_host::WorldBuilder::checked).
    fn compare(&self, plan: CollectivePlan, terms: impl FnOnce() -> String) -> Result<()> {
        self.communicator.compare_kernel(&self.order, || format!("{} by {plan}", terms()))
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
}

impl Workspace {
    /// Returns a block's most threads; a multiprocessor has room for `room` threads of the kernel.
    fn threads(&self, room: u32) -> u32 {
        self.options.threads(room.min(self.most_resident))
    }

    /// Returns the plan of a kernel with barriers, with as many [`threads`](Self::threads).
    fn plan(&self, algorithm: Algorithm, room: u32) -> CollectivePlan {
        let (blocks, threads) = (self.options.blocks(), self.threads(room));
        CollectivePlan { algorithm, blocks, threads }
    }

    fn new(comm: &Communicator, options: CollectivesOptions, most_resident: u32) -> Result<Self> {
        let (ranks, blocks) = (comm.n_ranks(), options.blocks());
        // Even an empty message of `all_to_all_v` uses a slot for each lane of a warp.
        let slots = options.all_reduce_slots(ranks).max(32) as u32;
        let mut memory = LamportMemory::allocate(comm, slots)?;
        memory.alone = options.concurrent == 1;
        // New windows are zeroed, as `arrived` must be. No rank sends before the slots of all are
        // empty: the ranks meet at the end of `Collectives::new`.
        Ok(Self {
            dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            options,
            memory,
            inbox: comm.window(push_allreduce::inbox(ranks, blocks, most_pushed(ranks)))?,
            offers: comm.mem_alloc(2 * ranks)?,
            arrived: comm.window(ranks * blocks as usize)?,
            most_resident,
        })
    }
}

impl std::fmt::Debug for Collectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Collectives({} ranks)", self.communicator.n_ranks())
    }
}
