//! Collectives by load and store, with NCCL's for what these do not reach.

use std::cell::RefCell;
use std::sync::LazyLock;

use devcomm_host::{
    Buffer, Communicator, DataType, DevCommRequirements, DevCommResource, DeviceSlice, KernelSet,
    Kernels, LaunchConfig, ModuleSource, ReduceOp, Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels as kernels;
use devcomm_kernels::collectives::push_allreduce::{self, Ring, RingArgs};
use devcomm_kernels::collectives::reduction::{Reduction, ReductionArgs};
use devcomm_kernels::collectives::rmsnorm::ROW_VECTORS;
use devcomm_types::{Element, Kernel};
use half::{bf16, f16};
use nccl_device::{EMPTY, Epoch, Lamport, LamportSlots};

use crate::check::{check_buffer, refuse, require_context};
use crate::{KERNELS, modules};

/// Collectives on a communicator: by kernels where load and store reach all ranks, and by NCCL.
///
/// As with a [`Communicator`], every rank calls the same operations in the same order, with buffers
/// of the same lengths and types, all in windows or none. Launches are dependent ones. Only work on
/// the operation's stream may access its buffers until it has ended. During a stream capture all
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
    flags: Window<u32>,
    push_state: SymmetricBuffer<u32>,
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
        Self { lamport_bytes: None, push_blocks: 64 }
    }

    /// The longest message in bytes that is sent in one step. The workspace takes three times as
    /// many bytes for each rank. Default: 4 MiB for 2 ranks, 1 MiB for 4, 512 KiB for 8.
    pub const fn lamport_bytes(self, bytes: usize) -> Self {
        Self { lamport_bytes: Some(bytes), ..self }
    }

    /// The blocks that push long messages. Default: 64.
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
        kernels::lamport_rmsnorm::<f32>::FILE,
        kernels::push_allreduce::<f32>::FILE,
        kernels::rmsnorm::<f32>::FILE,
    ])
});

/// The ring of a block that pushes.
const RING: Ring = Ring { chunk: (64 << 10) / 16, slots: 4 };

/// How a collective is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// In one step, by messages that are their own flags.
    Lamport,
    /// In two steps, by stores to the ranks that reduce, and from them.
    Push,
    /// By NCCL.
    Nccl,
}

/// The most bytes of a row that `rmsnorm` keeps in registers.
const MAX_ROW: usize = 16 * ROW_VECTORS * 512;

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

impl Collectives {
    /// For collectives of this communicator. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of loading kernels, and of creating windows and a device communicator.
    pub fn new(comm: &Communicator) -> Result<Self> {
        CollectivesOptions::new().build(comm)
    }

    /// How an all-reduce of these buffers is done.
    #[must_use]
    pub fn all_reduce_algorithm<S, R>(&self, send: &S, recv: &R, op: ReduceOp) -> Algorithm
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        self.choose(&send.device_slice(), &recv.device_slice(), op)
    }

    fn choose<T: Element>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
    ) -> Algorithm {
        let (ranks, bytes) = (self.communicator.n_ranks(), send.len() * T::DATA_TYPE.size());
        let reduces =
            matches!(T::DATA_TYPE, DataType::Float32 | DataType::Float16 | DataType::Bfloat16);
        match &self.workspace {
            Some(workspace) if reduces && op != ReduceOp::Prod && !send.is_empty() => {
                let aligned = (send.device_address() | recv.device_address()).is_multiple_of(16);
                let most = RING.most(ranks, workspace.options.push_blocks);
                if bytes <= 16 * workspace.options.slots(ranks) {
                    Algorithm::Lamport
                } else if aligned && bytes <= most && Window::<T>::containing(recv).is_some() {
                    Algorithm::Push
                } else {
                    Algorithm::Nccl
                }
            }
            _ => Algorithm::Nccl,
        }
    }

    /// Every rank's `recv` gets the reduction of all ranks' `send`; both have the same length.
    ///
    /// # Errors
    ///
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce<S, R>(&self, send: &S, recv: &R, op: ReduceOp, stream: &Stream) -> Result<()>
    where
        S: Buffer<Element: Element>,
        R: Buffer<Element = S::Element>,
    {
        let (send, recv) = (send.device_slice(), recv.device_slice());
        let algorithm = self.choose(&send, &recv, op);
        let Some(workspace) = self.workspace.as_ref().filter(|_| algorithm != Algorithm::Nccl)
        else {
            return self.communicator.all_reduce(&send, &recv, op, stream);
        };
        self.check(&send, &recv, stream)?;
        self.order(stream)?;
        // SAFETY: both buffers have the elements; dropping one waits for the stream.
        unsafe {
            match algorithm {
                Algorithm::Push => self.push(workspace, &send, &recv, op, stream),
                _ => self.lamport(workspace, &send, &recv, op, stream),
            }
        }
    }

    fn reduction(&self, op: ReduceOp) -> ReductionArgs<u32, f32, f32> {
        let (operator, output) = match op {
            ReduceOp::Max => (Reduction::MAX, 1.0),
            ReduceOp::Min => (Reduction::MIN, 1.0),
            ReduceOp::Avg => (Reduction::SUM, 1.0 / self.communicator.n_ranks() as f32),
            _ => (Reduction::SUM, 1.0),
        };
        ReductionArgs { operator, input: 1.0, output }
    }

    /// Launches `lamport_allreduce`.
    ///
    /// # Safety
    ///
    /// The buffers stay allocated until the kernel has ended.
    unsafe fn lamport<T: Element>(
        &self,
        workspace: &Workspace,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, slots, slots_state, .. } = workspace;
        let capacity = options.slots(self.communicator.n_ranks()) as u32;
        let (count, data_type) = (send.len(), T::DATA_TYPE);
        let vectors = (count * data_type.size()).div_ceil(16) as u32;
        let threads = match vectors {
            0..=64 => 64,
            65..=4096 => 128,
            4097..=16384 => 256,
            _ => 512,
        };
        let blocks = vectors.div_ceil(threads).min(stream.context().limits().multiprocessors);
        let config = LaunchConfig::new(blocks, threads).with_dependent();
        let (send, recv) = (send.device_address(), recv.device_address());
        let (reduction, target) = (self.reduction(op), self.compiled.on(stream));
        macro_rules! launch {
            ($type:ty) => {{
                let launch = kernels::lamport_allreduce::<$type>::args(
                    dev_comm,
                    slots,
                    slots_state,
                    capacity,
                    send,
                    recv,
                    count,
                    reduction,
                );
                // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
                // launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        of_floats!(data_type, launch)
    }

    /// Launches `push_allreduce`.
    ///
    /// # Safety
    ///
    /// As [`lamport`](Self::lamport).
    unsafe fn push<T: Element>(
        &self,
        workspace: &Workspace,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let Workspace { dev_comm, options, inbox, flags, push_state, .. } = workspace;
        let (count, data_type, blocks) = (send.len(), T::DATA_TYPE, options.push_blocks);
        let vectors = (count * data_type.size()).div_ceil(16);
        // A block pushes at least as many chunks to each peer as it has slots.
        let each = vectors.div_ceil(self.communicator.n_ranks() * blocks as usize);
        let chunk = each.div_ceil(RING.slots as usize).next_multiple_of(64);
        let ring = RingArgs { chunk: RING.chunk.min(chunk as u32), slots: RING.slots };
        let config = LaunchConfig::new(blocks, push_allreduce::THREADS).with_dependent();
        let send = send.device_address();
        let (reduction, target) = (self.reduction(op), self.compiled.on(stream));
        macro_rules! launch {
            ($type:ty) => {{
                let Some((window, first)) = Window::<$type>::containing(recv) else {
                    return refuse("the buffer to receive in is in no window".to_owned());
                };
                let launch = kernels::push_allreduce::<$type>::args(
                    dev_comm, send, &window, first, count, inbox, flags, push_state, ring,
                    reduction,
                );
                // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
                // launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        of_floats!(data_type, launch)
    }

    /// `residual` gets itself plus the sum of all ranks' `input`, and `output` that sum normalised
    /// by RMSNorm: for each token, a row of as many elements as `weight` has, `sum * weight /
    /// sqrt(mean(sum^2) + eps)`. All ranks get the same if their residuals are the same. `output`
    /// may be `input`; nothing else overlaps.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for buffers of other lengths,
    /// of other contexts or not aligned to 16 bytes, and for rows that are not a multiple of 16
    /// bytes or have more than 16 KiB; those of the launch.
    pub fn all_reduce_rmsnorm<I, R, W, O>(
        &self,
        input: &I,
        residual: &R,
        weight: &W,
        output: &O,
        eps: f32,
        stream: &Stream,
    ) -> Result<()>
    where
        I: Buffer<Element: Element>,
        R: Buffer<Element = I::Element>,
        W: Buffer<Element = I::Element>,
        O: Buffer<Element = I::Element>,
    {
        let data_type = <I::Element as Element>::DATA_TYPE;
        let (input, output) = (input.device_slice(), output.device_slice());
        let (residual, weight) = (residual.device_slice(), weight.device_slice());
        let (count, hidden) = (input.len(), weight.len());
        for (name, slice, len) in [
            ("the input", &input, count),
            ("the residual", &residual, count),
            ("the weight", &weight, hidden),
            ("the output", &output, count),
        ] {
            require_context(name, slice.context(), self.communicator.context())?;
            check_buffer(name, slice.device_address(), slice.len(), 1, len)?;
        }
        let row = hidden * data_type.size();
        if hidden == 0 || !row.is_multiple_of(16) || row > MAX_ROW || !count.is_multiple_of(hidden)
        {
            return refuse(format!(
                "{count} elements in rows of {hidden}: rows have whole vectors of 16 bytes, and at \
                 most {MAX_ROW} bytes"
            ));
        }
        if !matches!(data_type, DataType::Float32 | DataType::Float16 | DataType::Bfloat16) {
            return refuse(format!("RMSNorm of {data_type:?}"));
        }
        require_context("the stream", stream.context(), self.communicator.context())?;
        let tokens = (count / hidden) as u32;
        let algorithm = match self.choose(&input, &output, ReduceOp::Sum) {
            Algorithm::Lamport => Algorithm::Lamport,
            _ => Algorithm::Nccl,
        };
        let threads = (row as u32 / 16).div_ceil(ROW_VECTORS as u32).next_multiple_of(32);
        let blocks = tokens.clamp(1, stream.context().limits().multiprocessors);
        let config = LaunchConfig::new(blocks, threads).with_dependent();
        let target = self.compiled.on(stream);
        let [input_at, residual, weight, output_at] =
            [&input, &residual, &weight, &output].map(|slice| slice.device_address());
        let hidden = hidden as u32;
        macro_rules! launch {
            ($type:ty) => {
                match self.workspace.as_ref().filter(|_| algorithm == Algorithm::Lamport) {
                    Some(Workspace { dev_comm, options, slots, slots_state, .. }) => {
                        let capacity = options.slots(self.communicator.n_ranks()) as u32;
                        let launch = kernels::lamport_rmsnorm::<$type>::args(
                            dev_comm,
                            slots,
                            slots_state,
                            capacity,
                            input_at,
                            residual,
                            weight,
                            output_at,
                            tokens,
                            hidden,
                            eps,
                        );
                        // SAFETY: the buffers have the elements, aligned; dropping one waits for
                        // the stream. The workspace is as the kernel needs it, and the launches
                        // that use it are ordered.
                        unsafe { launch.config(config).launch(&target) }
                    }
                    _ => {
                        let launch = kernels::rmsnorm::<$type>::args(
                            output_at, residual, weight, output_at, tokens, hidden, eps,
                        );
                        // SAFETY: the buffers have the elements, aligned; dropping one waits for
                        // the stream.
                        unsafe { launch.config(config).launch(&target) }
                    }
                }
            };
        }
        if algorithm == Algorithm::Lamport {
            self.order(stream)?;
        } else {
            self.communicator.all_reduce(&input, &output, ReduceOp::Sum, stream)?;
        }
        of_floats!(data_type, launch)
    }

    fn check<T>(
        &self,
        send: &DeviceSlice<T>,
        recv: &DeviceSlice<T>,
        stream: &Stream,
    ) -> Result<()> {
        let own = self.communicator.context();
        require_context("the stream", stream.context(), own)?;
        require_context("the buffer to send", send.context(), own)?;
        require_context("the buffer to receive in", recv.context(), own)?;
        if send.len() != recv.len() {
            let (send, recv) = (send.len(), recv.len());
            return refuse(format!("an all-reduce of {send} elements has {recv} results"));
        }
        Ok(())
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
        let words = ranks * LamportSlots::<1>::words(options.slots(ranks));
        let slots = comm.window::<u32>(words)?;
        slots.copy_from_host(&vec![EMPTY; words])?;
        let zeros = |words: usize| {
            let memory = comm.mem_alloc::<u32>(words)?;
            memory.fill_bytes(0)?;
            Ok::<_, devcomm_host::Error>(memory)
        };
        let workspace = Self {
            dev_comm: comm.create_dev_comm(DevCommRequirements::new())?,
            options,
            slots,
            slots_state: zeros(Lamport::<1>::STATE)?,
            inbox: comm.window(RING.inbox(ranks, blocks))?,
            // New windows are zeroed, as the flags must be.
            flags: comm.window(Ring::flags(ranks, blocks))?,
            push_state: zeros(Epoch::WORDS)?,
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
