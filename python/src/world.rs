//! Worlds, and the ranks that run a function of Python.

use std::fmt::{self, Display};
use std::ptr::NonNull;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};

use devcomm::{Error, Rank, Simulation, World};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple, PyType};

use crate::communicator::{Comm, PyCommunicator};
use crate::debug;
use crate::errors::{STATE_ERROR, exception, invalid, raise};
use crate::own::{Home, Own, Scope};
use crate::signals::{Interrupt, SleepsAfterPython, interrupted_by_signals, waiting};
use crate::stream::Gpu;

/// The ranks of a job, one GPU each: processes that a launcher started, of which this is one, or
/// threads of this process, on GPUs or simulated.
#[pyclass(name = "World", module = "devcomm", frozen)]
pub struct PyWorld {
    world: World,
}

#[pymethods]
impl PyWorld {
    /// Returns the world that the environment describes: under torchrun, mpirun or srun this
    /// process is one rank; otherwise there is a thread, and rank, for every GPU.
    /// DEVCOMM_SIMULATE=4 gives four simulated GPUs.
    #[classmethod]
    fn from_env(class: &Bound<'_, PyType>) -> PyResult<Self> {
        made(class.py(), World::from_env)
    }

    /// Returns a world of n ranks, threads of this process, each on a GPU of its own.
    #[classmethod]
    fn threads(class: &Bound<'_, PyType>, n: usize) -> PyResult<Self> {
        made(class.py(), || World::threads(n))
    }

    /// Returns a world of n ranks on simulated GPUs, threads of this process. They run one at a
    /// time, in an order that the seed determines; a deadlock or a race is an error.
    ///
    /// settings: those of DEVCOMM_SIMULATE, such as "team=2,seed=7".
    #[classmethod]
    #[pyo3(signature = (n, settings=""))]
    fn simulated(class: &Bound<'_, PyType>, n: usize, settings: &str) -> PyResult<Self> {
        if n == 0 {
            return Err(invalid("a world of 0 ranks"));
        }
        let text = if settings.is_empty() { n.to_string() } else { format!("{n},{settings}") };
        let simulation: Simulation =
            text.parse().map_err(|error| invalid(format!("settings: {error}")))?;
        made(class.py(), || World::builder().simulate(simulation).threads(n))
    }

    /// Returns the number of ranks.
    #[getter]
    fn n_ranks(&self) -> usize {
        self.world.n_ranks()
    }

    /// Returns whether the GPUs are simulated. Times measured there tell nothing about GPUs.
    #[getter]
    fn is_simulated(&self) -> bool {
        self.world.is_simulated()
    }

    /// Returns the version of NCCL in use, such as "2.32.3".
    #[getter]
    fn nccl_version(&self) -> String {
        self.world.library().version().to_string()
    }

    /// Calls function(rank, *args) on every rank of this process, and returns the results: those of
    /// all ranks, in order, if ranks are threads; that of this rank alone if they are processes.
    /// Returns when all ranks of the world are done.
    ///
    /// Ctrl-C ends the waits of the ranks and raises KeyboardInterrupt in them, and here within a
    /// second; a rank that is a thread and waits elsewhere, such as in time.sleep, goes on until
    /// that returns. A rank's function cannot run another world.
    ///
    /// What a rank makes ends with the function; on simulated GPUs it stays on the rank's thread.
    /// When a rank fails, the waits of the other ranks end with a WorldError; this raises the first
    /// one's exception.
    /// Simulated ranks must not wait for each other by locks of Python: only one of them runs.
    #[pyo3(signature = (function, *args))]
    fn run(
        &self,
        py: Python<'_>,
        function: Py<PyAny>,
        args: Py<PyTuple>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        World::refuse_nested().map_err(exception)?;
        let interrupt = Arc::new(Interrupt::default());
        let of_processes = self.world.is_of_processes();
        let known = Arc::clone(&interrupt);
        let call = move |rank: &Rank| {
            // Before the scope, whose end may ask for the GIL.
            let _sleeps = (!of_processes).then(SleepsAfterPython::enter);
            let _scope = Scope::enter();
            let rank = PyRank::new(rank)?;
            let called = Python::try_attach(|py| {
                let call = || {
                    let rank = Bound::new(py, rank)?.into_any();
                    let args = std::iter::once(rank).chain(args.bind(py).iter());
                    function.call1(py, PyTuple::new(py, args.collect::<Vec<_>>())?)
                };
                let result = if of_processes { call() } else { known.in_rank(py, call) };
                result.map_err(|error| Failure::Python { message: error.to_string(), error })
            });
            called.unwrap_or(Err(Failure::PythonEnds))
        };
        let world = self.world.clone();
        let results = match of_processes {
            true => interrupted_by_signals(py, || world.run(call))?,
            false => {
                let (sender, ended) = sync_channel(1);
                // The thread outlasts an interrupted call if a rank does.
                let run = move || sender.send(world.run(call));
                std::thread::Builder::new().name("devcomm-world".to_owned()).spawn(run)?;
                let results = interrupt.wait(py, &ended)?;
                results.ok_or_else(|| raise(STATE_ERROR, "the world's thread has panicked"))?
            }
        };
        results.map_err(|failure| match failure {
            Failure::Devcomm(error) => exception(error),
            Failure::Python { error, .. } => error,
            Failure::PythonEnds => raise(STATE_ERROR, PYTHON_ENDS),
        })
    }

    fn __repr__(&self) -> String {
        let simulated = if self.world.is_simulated() { "simulated " } else { "" };
        format!("World({} {simulated}ranks)", self.world.n_ranks())
    }
}

fn made(py: Python<'_>, make: impl FnOnce() -> devcomm::Result<World>) -> PyResult<PyWorld> {
    waiting(py, make).map(|world| PyWorld { world })
}

/// Why a rank fails.
enum Failure {
    Devcomm(Error),
    /// An exception of Python's, and its text, for which `Display` then needs no GIL: Python may
    /// have ended.
    Python {
        error: PyErr,
        message: String,
    },
    PythonEnds,
}

const PYTHON_ENDS: &str = "Python ends";

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Devcomm(error)
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Devcomm(error) => error.fmt(f),
            Self::Python { message, .. } => message.fmt(f),
            Self::PythonEnds => PYTHON_ENDS.fmt(f),
        }
    }
}

/// A rank in its function, and its GPU.
struct Running {
    rank: OfRank,
    gpu: Arc<Gpu>,
    /// The rank's communicator, once it is made.
    comm: OnceLock<Arc<Comm>>,
}

impl Running {
    fn rank(&self) -> &Rank {
        // SAFETY: the rank lives while its function runs. That function's scope drops this at its
        // end, and the handle gives it out on the function's thread only.
        unsafe { self.rank.0.as_ref() }
    }
}

/// Where a rank is.
struct OfRank(NonNull<Rank>);

// SAFETY: only `Running::rank` reads what is there, on the rank's thread.
unsafe impl Send for OfRank {}
// SAFETY: only `Running::rank` reads what is there, on the rank's thread: no two threads do.
unsafe impl Sync for OfRank {}

/// One rank: the argument of the function that a world runs.
#[pyclass(name = "Rank", module = "devcomm", frozen)]
pub struct PyRank {
    own: Own<Running>,
    /// This rank, below n_ranks.
    #[pyo3(get)]
    rank: usize,
    /// The number of ranks.
    #[pyo3(get)]
    n_ranks: usize,
    /// This rank's number among the ranks of its host.
    #[pyo3(get)]
    local_rank: usize,
    /// The ordinal of this rank's GPU.
    #[pyo3(get)]
    device: usize,
    /// Whether the GPU is simulated.
    #[pyo3(get)]
    is_simulated: bool,
}

impl PyRank {
    fn new(rank: &Rank) -> devcomm::Result<Self> {
        let gpu = Gpu::new(rank.context(), rank.is_simulated())?;
        let (gpu, comm) = (Arc::new(gpu), OnceLock::new());
        let running = Running { rank: OfRank(NonNull::from(rank)), gpu, comm };
        Ok(Self {
            own: Own::new(&Home::here(false), running),
            rank: rank.rank(),
            n_ranks: rank.n_ranks(),
            local_rank: rank.local_rank(),
            device: rank.device(),
            is_simulated: rank.is_simulated(),
        })
    }

    fn with<R>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Running) -> devcomm::Result<R>,
    ) -> PyResult<R> {
        let running = self.own.get()?;
        waiting(py, || f(&running))
    }
}

#[pymethods]
impl PyRank {
    /// Returns the communicator of all ranks. The first call is collective.
    fn communicator(&self, py: Python<'_>) -> PyResult<PyCommunicator> {
        let made = self.with(py, |running| {
            let communicator = running.rank().communicator()?;
            let make = || Comm::new(communicator.clone(), Arc::clone(&running.gpu));
            Ok(Arc::clone(running.comm.get_or_init(make)))
        });
        made.map(PyCommunicator::new)
    }

    /// Returns the communicator at an address (ncclComm_t), which another library made of the ranks
    /// of this world, in their order, and which outlives the world. Collective.
    fn communicator_from_nccl(&self, py: Python<'_>, address: usize) -> PyResult<PyCommunicator> {
        let made = self.with(py, |running| {
            let raw = address as *mut std::ffi::c_void;
            // SAFETY: the caller passes the address of a communicator that is live, as the
            // documentation asks.
            let communicator = unsafe { running.rank().communicator_from_raw(raw)? };
            Ok(Comm::new(communicator, Arc::clone(&running.gpu)))
        });
        made.map(PyCommunicator::new)
    }

    /// Waits until every rank has called this, and not for the GPUs. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        debug::barrier(py, None, || self.with(py, |running| running.rank().barrier()))
    }

    /// Returns the bytes of every rank, in the order of ranks. Collective.
    fn all_gather<'py>(&self, py: Python<'py>, value: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let all = self.with(py, |running| running.rank().all_gather(value))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Returns the host names of all ranks.
    #[getter]
    fn hosts(&self) -> PyResult<Vec<String>> {
        Ok(self.own.get()?.rank().hosts().to_vec())
    }

    fn __repr__(&self) -> String {
        let simulated = if self.is_simulated { "simulated " } else { "" };
        format!("Rank({} of {}, {simulated}GPU {})", self.rank, self.n_ranks, self.device)
    }
}
