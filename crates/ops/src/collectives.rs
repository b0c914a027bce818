//! Collectives by load and store, with NCCL's for what these do not reach.

use std::cell::RefCell;
use std::sync::LazyLock;

use devcomm_host::{
    Buffer, Communicator, DataType, DevCommRequirements, DevCommResource, DeviceSlice, KernelSet,
    Kernels, LaunchConfig, ModuleSource, ReduceOp, Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels::{self as kernels, ROW_VECTORS, Reduction, ReductionArgs};
use devcomm_types::{Element, Kernel};
use half::{bf16, f16};
use nccl_device::{EMPTY, Lamport, LamportSlots};

use crate::check::{check_buffer, refuse, require_context};
use crate::{KERNELS, modules};

/// Collectives on a communicator: by load and store where that is faster than NCCL.
pub struct Collectives {
    communicator: Communicator,
    compiled: Kernels,
    lamport: Option<Slots>,
    /// The stream of the last launch: the workspace is used by one launch at a time.
    last: RefCell<Option<Stream>>,
}

/// The workspace of Lamport messages.
struct Slots {
    dev_comm: DevCommResource,
    window: Window<u32>,
    state: SymmetricBuffer<u32>,
    capacity: u32,
}

/// How a collective is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// In one step, by messages that are their own flags.
    Lamport,
    /// By NCCL.
    Nccl,
}

static MODULES: LazyLock<Vec<ModuleSource>> = LazyLock::new(|| {
    modules(&[
        kernels::lamport_allreduce::<f32>::FILE,
        kernels::lamport_rmsnorm::<f32>::FILE,
        kernels::rmsnorm::<f32>::FILE,
    ])
});

/// The most bytes of a row that `rmsnorm` keeps in registers.
const MAX_ROW: usize = 16 * ROW_VECTORS * 512;

/// Slots for each source rank: messages of up to 1 MiB.
const CAPACITY: u32 = (1 << 20) / 16;

impl Collectives {
    /// For collectives of this communicator. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of loading kernels, and of creating a window and a device communicator.
    pub fn new(comm: &Communicator) -> Result<Self> {
        let set = KernelSet { modules: &MODULES, unavailable: KERNELS.unavailable };
        let compiled = Kernels::load(comm.context(), &set)?;
        let ranks = comm.n_ranks();
        let reaches = matches!(ranks, 2 | 4 | 8) && comm.require_single_lsa_team().is_ok();
        let lamport = match reaches {
            true => Some(Slots::new(comm)?),
            false => None,
        };
        Ok(Self { communicator: comm.clone(), compiled, lamport, last: RefCell::default() })
    }

    /// How an all-reduce of this many elements is done.
    #[must_use]
    pub fn all_reduce_algorithm(
        &self,
        data_type: DataType,
        count: usize,
        op: ReduceOp,
    ) -> Algorithm {
        let bytes = match data_type {
            DataType::Float32 => Some(4),
            DataType::Float16 | DataType::Bfloat16 => Some(2),
            _ => None,
        };
        let fits = |slots: &Slots| {
            bytes.is_some_and(|bytes| (1..=slots.capacity as usize * 16 / bytes).contains(&count))
        };
        match op {
            ReduceOp::Prod => Algorithm::Nccl,
            _ if self.lamport.as_ref().is_some_and(fits) => Algorithm::Lamport,
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
        let data_type = <S::Element as Element>::DATA_TYPE;
        match (self.all_reduce_algorithm(data_type, send.len(), op), &self.lamport) {
            (Algorithm::Lamport, Some(slots)) => {
                self.check(&send, &recv, stream)?;
                self.order(stream)?;
                let addresses = [send.device_address(), recv.device_address()];
                // SAFETY: both buffers have the elements; dropping one waits for the stream.
                unsafe { self.lamport(slots, data_type, addresses, send.len(), op, stream) }
            }
            _ => self.communicator.all_reduce(&send, &recv, op, stream),
        }
    }

    /// Launches `lamport_allreduce`.
    ///
    /// # Safety
    ///
    /// The buffers have `count` elements until the kernel has ended.
    unsafe fn lamport(
        &self,
        Slots { dev_comm, window, state, capacity }: &Slots,
        data_type: DataType,
        [send, recv]: [u64; 2],
        count: usize,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let ranks = self.communicator.n_ranks() as f32;
        let (operator, output) = match op {
            ReduceOp::Max => (Reduction::MAX, 1.0),
            ReduceOp::Min => (Reduction::MIN, 1.0),
            ReduceOp::Avg => (Reduction::SUM, 1.0 / ranks),
            _ => (Reduction::SUM, 1.0),
        };
        let vectors = (count * data_type.size()).div_ceil(16) as u32;
        let threads = match vectors {
            0..=64 => 64,
            65..=4096 => 128,
            4097..=16384 => 256,
            _ => 512,
        };
        let blocks = vectors.div_ceil(threads).min(stream.context().limits().multiprocessors);
        let config = LaunchConfig::new(blocks, threads).with_dependent();
        let target = self.compiled.on(stream);
        macro_rules! launch {
            ($type:ty) => {{
                let reduction = ReductionArgs { operator, input: 1.0, output };
                let launch = kernels::lamport_allreduce::<$type>::args(
                    dev_comm, window, state, *capacity, send, recv, count, reduction,
                );
                // SAFETY: the caller's contract; the workspace is as the kernel needs it, and the
                // launches that use it are ordered.
                unsafe { launch.config(config).launch(&target) }
            }};
        }
        match data_type {
            DataType::Float32 => launch!(f32),
            DataType::Float16 => launch!(f16),
            _ => launch!(bf16),
        }
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
        let algorithm = self.all_reduce_algorithm(data_type, count, ReduceOp::Sum);
        let threads = (row as u32 / 16).div_ceil(ROW_VECTORS as u32).next_multiple_of(32);
        let blocks = tokens.clamp(1, stream.context().limits().multiprocessors);
        let config = LaunchConfig::new(blocks, threads).with_dependent();
        let target = self.compiled.on(stream);
        let [input_at, residual, weight, output_at] =
            [&input, &residual, &weight, &output].map(|slice| slice.device_address());
        let hidden = hidden as u32;
        macro_rules! launch {
            ($type:ty) => {
                match (algorithm, &self.lamport) {
                    (Algorithm::Lamport, Some(slots)) => {
                        let Slots { dev_comm, window, state, capacity } = slots;
                        let launch = kernels::lamport_rmsnorm::<$type>::args(
                            dev_comm, window, state, *capacity, input_at, residual, weight,
                            output_at, tokens, hidden, eps,
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
        match algorithm {
            Algorithm::Lamport => self.order(stream)?,
            Algorithm::Nccl => {
                self.communicator.all_reduce(&input, &output, ReduceOp::Sum, stream)?
            }
        }
        match data_type {
            DataType::Float32 => launch!(f32),
            DataType::Float16 => launch!(f16),
            _ => launch!(bf16),
        }
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

impl Slots {
    fn new(comm: &Communicator) -> Result<Self> {
        let words = comm.n_ranks() * LamportSlots::<1>::words(CAPACITY as usize);
        let window = comm.window::<u32>(words)?;
        window.copy_from_host(&vec![EMPTY; words])?;
        let state = comm.mem_alloc::<u32>(Lamport::<1>::STATE)?;
        state.copy_from_host(&[0; Lamport::<1>::STATE])?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
        // No rank sends before all slots are empty.
        comm.barrier()?;
        Ok(Self { dev_comm, window, state, capacity: CAPACITY })
    }
}

impl std::fmt::Debug for Collectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Collectives({} ranks)", self.communicator.n_ranks())
    }
}
