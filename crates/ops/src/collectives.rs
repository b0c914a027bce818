//! Collectives by load and store, with NCCL's for what these do not reach.

use std::cell::RefCell;
use std::sync::LazyLock;

use devcomm_host::{
    Buffer, Communicator, DataType, DevCommRequirements, DevCommResource, DeviceSlice, KernelSet,
    Kernels, LaunchConfig, ModuleSource, ReduceOp, Result, Stream, SymmetricBuffer, Window,
};
use devcomm_kernels::{self as kernels, Reduction, ReductionArgs};
use devcomm_types::{Element, Kernel};
use half::{bf16, f16};
use nccl_device::{EMPTY, Lamport, LamportSlots};

use crate::check::{refuse, require_context};
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

static MODULES: LazyLock<Vec<ModuleSource>> =
    LazyLock::new(|| modules(&[kernels::lamport_allreduce::<f32>::FILE]));

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
            ..=64 => 64,
            ..=4096 => 128,
            ..=16384 => 256,
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
