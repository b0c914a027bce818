//! Runs kernels under test on simulated GPUs.

use std::ops::Deref;
use std::sync::Arc;

use devcomm::sim;
use devcomm::{
    Buffer, DevCommRequirements, DevCommResource, Element, Kernel, Launch, Rank, Result,
    Simulation, Stream, SymmetricBuffer, WITHOUT_PTX, Window, World,
};
use devcomm_types::LaunchArgs;

/// One rank of a simulated world, with a stream and helpers for tests of kernels.
pub struct Gpu<'a> {
    rank: &'a Rank,
    stream: Stream,
}

impl Deref for Gpu<'_> {
    type Target = Rank;

    fn deref(&self) -> &Rank {
        self.rank
    }
}

impl<'a> Gpu<'a> {
    /// Returns a rank whose kernels are all simulated ones.
    ///
    /// # Errors
    ///
    /// The errors are those of the host API.
    pub fn new(rank: &'a Rank) -> Result<Self> {
        rank.load(&WITHOUT_PTX)?;
        Ok(Self { rank, stream: rank.stream()? })
    }

    /// Returns a window with these elements in this rank; each rank passes its own. *Collective*.
    ///
    /// # Errors
    ///
    /// The errors are those of the host API.
    pub fn window<T: Element>(&self, elements: &[T]) -> Result<Window<T>> {
        let window = self.communicator()?.window(elements.len())?;
        window.copy_from_host(elements)?;
        // Peers' kernels may write to it from now on.
        self.barrier()?;
        Ok(window)
    }

    /// Returns memory of this rank that is not in a window, with these elements.
    ///
    /// # Errors
    ///
    /// The errors are those of the host API.
    pub fn buffer<T: Element>(&self, elements: &[T]) -> Result<SymmetricBuffer<T>> {
        let buffer = SymmetricBuffer::new(self.library(), self.context(), elements.len())?;
        buffer.copy_from_host(elements)?;
        Ok(buffer)
    }

    /// Returns a device communicator of all ranks. *Collective*.
    ///
    /// # Errors
    ///
    /// The errors are those of the host API.
    pub fn dev_comm(&self, requirements: DevCommRequirements) -> Result<DevCommResource> {
        self.communicator()?.create_dev_comm(requirements)
    }

    /// Launches a kernel, and waits until it has ended in every rank. *Collective*.
    ///
    /// The function is safe, to keep tests short: a test defines the kernel next to the launch, and
    /// the simulator reports an invalid access instead of executing it.
    ///
    /// # Errors
    ///
    /// The errors are those of the host API, and those that the simulator reports.
    pub fn launch<K: Kernel, A: LaunchArgs<K::Args>, S>(
        &self,
        launch: Launch<K, A, S>,
    ) -> Result<()> {
        // SAFETY: every rank launches the same kernels in the same order; the test keeps the
        // kernel's own contract, or the simulator reports the access that breaks it.
        unsafe { launch.into_unsafe().launch(&self.stream) }?;
        self.stream.synchronize()?;
        self.barrier()
    }
}

/// Returns a copy of device memory, after waiting for this rank's streams.
///
/// # Errors
///
/// The errors are those of the host API.
pub fn read<T: Element>(memory: &impl Buffer<Element = T>) -> Result<Vec<T>> {
    let slice = memory.device_slice();
    // SAFETY: every bit pattern is a valid element, by the contract of `Element`.
    let mut elements = vec![unsafe { std::mem::zeroed() }; slice.len()];
    slice.copy_to_host(&mut elements)?;
    Ok(elements)
}

/// Returns a world of all GPUs of a simulated machine.
///
/// # Panics
///
/// For invalid settings.
#[track_caller]
pub fn world(simulation: Simulation) -> World {
    World::builder().simulate(simulation).from_env().unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `body` in every rank of a simulated world.
///
/// # Errors
///
/// The error of the rank that failed first.
pub fn run<T: Send>(world: &World, body: impl Fn(&Gpu<'_>) -> Result<T> + Sync) -> Result<Vec<T>> {
    world.run(|rank| body(&Gpu::new(rank)?))
}

/// Runs `body` in every rank of a simulated machine, and returns the results.
///
/// # Panics
///
/// If `body` fails.
#[track_caller]
pub fn simulate<T: Send>(
    simulation: Simulation,
    body: impl Fn(&Gpu<'_>) -> Result<T> + Sync,
) -> Vec<T> {
    run(&world(simulation), body).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the error that the simulator reports when it runs a `body` that breaks a rule.
///
/// # Panics
///
/// If the simulator reports none.
#[track_caller]
pub fn failure(
    simulation: Simulation,
    body: impl Fn(&Gpu<'_>) -> Result<()> + Sync,
) -> Arc<sim::Error> {
    let world = world(simulation);
    let result = run(&world, body);
    let failure = world.simulated_machine().and_then(sim::Machine::failure);
    failure.unwrap_or_else(|| panic!("the simulator has nothing to report: {result:?}"))
}
