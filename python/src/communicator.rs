//! Python's class `Communicator`: one of devcomm's world, or one that another library has made.

use std::borrow::Cow;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use devcomm::{
    Communicator, Context, DevCommRequirements, DevCommResource, GinConnectionType, Library, LlA2a,
    OLDEST_VERSION, ResourceBuffer, Signal, WaitSignalDesc,
};
use devcomm_types::nccl::LlA2aHandle;
use pyo3::prelude::*;
use pyo3::types::PyType;

use crate::array::type_of;
use crate::debug;
use crate::errors::invalid;
use crate::own::{Home, Own};
use crate::signals::waiting;
use crate::store::Store;
use crate::stream::Gpu;
use crate::window::{PyWindow, Win};

/// A communicator, its GPU, and its windows.
pub struct Comm {
    pub communicator: Communicator,
    pub gpu: Arc<Gpu>,
    /// The table of Python's objects that are made from it.
    pub home: Home,
    windows: Mutex<Vec<Weak<Win>>>,
}

impl Comm {
    pub fn new(communicator: Communicator, gpu: Arc<Gpu>) -> Arc<Self> {
        let (home, windows) = (Home::here(!gpu.simulated), Mutex::default());
        Arc::new(Self { communicator, gpu, home, windows })
    }

    /// Returns the windows that Python has and that are not closed.
    pub fn windows(&self) -> Vec<Arc<Win>> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.retain(|window| window.strong_count() > 0);
        windows.iter().filter_map(Weak::upgrade).filter(|window| window.is_valid()).collect()
    }

    pub fn add_window(&self, window: &Arc<Win>) {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        windows.push(Arc::downgrade(window));
    }
}

/// Ranks that communicate, one GPU each.
///
/// `rank.communicator()` makes one in a world; `from_torch` and `from_nccl` use another library's.
#[pyclass(name = "Communicator", module = "devcomm", frozen)]
pub struct PyCommunicator {
    own: Own<Arc<Comm>>,
    /// This rank.
    #[pyo3(get)]
    rank: usize,
    /// The number of ranks.
    #[pyo3(get)]
    n_ranks: usize,
    /// The ordinal of this rank's GPU.
    #[pyo3(get)]
    device: usize,
    /// Whether the GPU is simulated.
    #[pyo3(get)]
    is_simulated: bool,
}

impl PyCommunicator {
    pub fn new(comm: Arc<Comm>) -> Self {
        let (rank, n_ranks) = (comm.communicator.rank(), comm.communicator.n_ranks());
        let (device, is_simulated) = (comm.gpu.context.ordinal(), comm.gpu.simulated);
        Self { own: Own::new(&comm.home.clone(), comm), rank, n_ranks, device, is_simulated }
    }

    pub fn get(&self) -> PyResult<Arc<Comm>> {
        Ok(Arc::clone(&*self.own.get()?))
    }
}

#[pymethods]
impl PyCommunicator {
    /// Returns a communicator that uses torch's NCCL communicator of a process group, on torch's
    /// current device. Collective: all ranks of the group call this.
    ///
    /// group: a process group with the backend nccl; None: the default group.
    /// store: a torch.distributed.Store by which the ranks exchange requirements and notice a lost
    ///     rank; None: the default group's.
    /// deadline: the seconds after which a rank that others wait for counts as lost. So does one
    ///     from which nothing was heard for as long, such as one in a call that keeps Python's
    ///     lock, or whose process has ended without a close. None: no rank does.
    ///
    /// Torch still owns its communicator, which must outlive this object and the windows and device
    /// communicators that are made of it: close them, and then this, before destroy_process_group,
    /// or never. Torch's NCCL must be one that devcomm's kernels were built for: pip install
    /// nvidia-nccl-cu13==2.32.3, or see devcomm.load_nccl.
    #[classmethod]
    #[pyo3(signature = (group=None, *, store=None, deadline=Some(600.0)))]
    fn from_torch(
        class: &Bound<'_, PyType>,
        group: Option<Bound<'_, PyAny>>,
        store: Option<Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Self> {
        let py = class.py();
        let parts = py.import("devcomm._torch")?.call_method1("parts", (group, store))?;
        let (address, device, store): (usize, usize, Bound<'_, PyAny>) = parts.extract()?;
        Self::from_nccl(class, address, device, Some(store), deadline)
    }

    /// Returns the communicator at an address (ncclComm_t), on the GPU with this ordinal.
    /// Collective if there is a store, which has set, get, check and delete_key as
    /// torch.distributed.Store does.
    #[classmethod]
    #[pyo3(signature = (address, device, *, store=None, deadline=Some(600.0)))]
    fn from_nccl(
        class: &Bound<'_, PyType>,
        address: usize,
        device: usize,
        store: Option<Bound<'_, PyAny>>,
        deadline: Option<f64>,
    ) -> PyResult<Self> {
        let deadline = deadline.map(Duration::try_from_secs_f64).transpose();
        let deadline = deadline.map_err(|error| invalid(format!("deadline: {error}")))?;
        let store = store.map(|store| Arc::new(Store::new(store)));
        let make = || {
            let library = Library::open_at_least(None, OLDEST_VERSION)?;
            let context = Context::new(device)?;
            let raw = address as *mut c_void;
            // SAFETY: the caller's promise: a live communicator of this NCCL, which nothing else
            // uses during calls.
            let communicator = unsafe {
                match store {
                    Some(store) => {
                        Communicator::from_raw_with(&library, &context, raw, store, deadline)?
                    }
                    None => Communicator::from_raw(&library, &context, raw)?,
                }
            };
            let gpu = Arc::new(Gpu::new(&context, false)?);
            Ok(Comm::new(communicator, gpu))
        };
        waiting(class.py(), make).map(Self::new)
    }

    /// Returns memory of `length` elements on each rank, zeroed, that all ranks' kernels access.
    /// Collective.
    ///
    /// dtype: of torch or numpy, or a name such as "float32" or "bf16".
    fn window(&self, length: usize, dtype: &Bound<'_, PyAny>) -> PyResult<PyWindow> {
        let (comm, data_type) = (self.get()?, type_of(dtype, "a window")?);
        waiting(dtype.py(), || Win::new(&comm, length, data_type)).map(PyWindow::new)
    }

    /// Returns a device communicator, with which kernels synchronise and communicate. Collective,
    /// with the same numbers on every rank.
    ///
    /// lsa_barriers: barriers between ranks that load and store reaches, at least one for each
    ///     block. barriers, world_gin_barriers, rail_gin_barriers: barriers that also go over the
    ///     network. gin_signals, gin_counters: numbers of these. gin_connection: "none", "full" or
    ///     "rail". lsa_multimem: a multicast mapping of the ranks that load and store reaches.
    /// ll_a2a: blocks, the most elements of an epoch and the bytes of one, for low-latency
    ///     all-to-alls: the argument of a kernel's LlA2aHandle is then DevComm.ll_a2a.
    /// buffer: bytes, and the alignment of their offset, of memory in the device communicator's own
    ///     window: the argument of a kernel's ResourceHandle is then DevComm.buffer.
    #[pyo3(signature = (
        *, lsa_barriers=0, barriers=0, world_gin_barriers=0, rail_gin_barriers=0, gin_signals=0,
        gin_counters=0, gin_connection="none", lsa_multimem=false, ll_a2a=None, buffer=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn dev_comm(
        &self,
        py: Python<'_>,
        lsa_barriers: u32,
        barriers: u32,
        world_gin_barriers: u32,
        rail_gin_barriers: u32,
        gin_signals: u32,
        gin_counters: u32,
        gin_connection: &str,
        lsa_multimem: bool,
        ll_a2a: Option<(u32, u32, u32)>,
        buffer: Option<(usize, usize)>,
    ) -> PyResult<PyDevComm> {
        let connection = match gin_connection {
            "none" => GinConnectionType::None,
            "full" => GinConnectionType::Full,
            "rail" => GinConnectionType::Rail,
            other => {
                return Err(invalid(format!(
                    "gin_connection={other:?}: expected \"none\", \"full\" or \"rail\""
                )));
            }
        };
        let mut requirements = DevCommRequirements::new()
            .lsa_barriers(lsa_barriers)
            .barriers(barriers)
            .world_gin_barriers(world_gin_barriers)
            .rail_gin_barriers(rail_gin_barriers)
            .gin_signals(gin_signals)
            .gin_counters(gin_counters)
            .gin_connection(connection)
            .lsa_multimem(lsa_multimem);
        let ll_a2a = ll_a2a.map(|(blocks, max_elements, element_size)| {
            requirements.add(LlA2a { blocks, max_elements, element_size })
        });
        let buffer = buffer.map(|(bytes, align)| requirements.add(ResourceBuffer { bytes, align }));
        let comm = self.get()?;
        let make = || {
            let made = comm.communicator.create_dev_comm(requirements)?;
            let ll_a2a = ll_a2a.map(|key| made.resource(key)).transpose()?;
            let buffer = buffer.map(|key| made.resource(key)).transpose()?;
            Ok((made, ll_a2a, buffer))
        };
        let (made, ll_a2a, buffer) = waiting(py, make)?;
        let ll_a2a = ll_a2a.map(|LlA2aHandle { buffer, n_slots }| [buffer, n_slots]);
        Ok(PyDevComm { own: Own::new(&comm.home, made), ll_a2a, buffer })
    }

    /// Whether the communicator can be used: it is not closed, and its world has not ended.
    #[getter]
    fn is_open(&self) -> bool {
        self.own.is_open()
    }

    /// Enqueues a signal to the rank peer on a stream, after the work that is there.
    ///
    /// index, context: which signal; only 0, 0, unless the communicator was made with more signals.
    #[pyo3(signature = (peer, *, index=0, context=0, stream=None))]
    fn signal(
        &self,
        py: Python<'_>,
        peer: usize,
        index: u32,
        context: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let comm = self.get()?;
        let stream = comm.gpu.stream(stream, py)?;
        waiting(py, || comm.communicator.signal(Signal { peer, index, context }, &stream))
    }

    /// Makes a stream wait until the rank peer has sent count signals that no earlier wait was for.
    /// Later work on the stream sees what the peer had put before its signals.
    ///
    /// index, context: as for signal.
    #[pyo3(signature = (peer, count=1, *, index=0, context=0, stream=None))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        peer: usize,
        count: u32,
        index: u32,
        context: u32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let comm = self.get()?;
        let stream = comm.gpu.stream(stream, py)?;
        let signals = [WaitSignalDesc { peer, count, index, context }];
        waiting(py, || comm.communicator.wait_signal(&signals, &stream))
    }

    /// Waits until every rank has called this, and not for the GPUs. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.get()?;
        debug::barrier(py, Some(&comm), || waiting(py, || comm.communicator.barrier()))
    }

    /// Waits until the work on a stream is done; None: torch's current stream, or devcomm's own.
    #[pyo3(signature = (stream=None))]
    fn synchronize(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.get()?.gpu.synchronize(py, stream)
    }

    /// Drops the communicator. Windows and device communicators that were made from it stay usable.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.own.close(py)
    }

    fn __repr__(&self) -> String {
        let Self { rank, n_ranks, device, is_simulated, .. } = self;
        let simulated = if *is_simulated { "simulated " } else { "" };
        format!("Communicator(rank {rank} of {n_ranks}, {simulated}GPU {device})")
    }
}

/// A device communicator: an argument for kernels' parameters of the type DevComm.
#[pyclass(name = "DevComm", module = "devcomm", frozen)]
pub struct PyDevComm {
    own: Own<DevCommResource>,
    /// The words of the handle of an `ll_a2a` that was asked for, in the order of its fields.
    ll_a2a: Option<[u32; 2]>,
    /// The ResourceHandle of the buffer that was asked for; None: none was.
    #[pyo3(get)]
    buffer: Option<u32>,
}

impl PyDevComm {
    pub fn get(&self) -> PyResult<Arc<DevCommResource>> {
        self.own.get()
    }
}

#[pymethods]
impl PyDevComm {
    /// The bytes of the LlA2aHandle that was asked for, the argument of a kernel; None: none was.
    #[getter]
    fn ll_a2a(&self) -> Option<Cow<'static, [u8]>> {
        self.ll_a2a.map(|words| words.map(u32::to_ne_bytes).concat().into())
    }

    /// Destroys the device communicator, which no kernel may use any more.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let resource = self.own.get()?;
        waiting(py, || resource.close())?;
        self.own.close(py)
    }
}
