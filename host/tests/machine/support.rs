//! Helpers of the tests: worlds, their recorded driver and NCCL calls, injected faults, checks.

use std::sync::Arc;
use std::time::Duration;

use devcomm_host::{
    Buffer, CallRecord, Communicator, Effect, Element, Error, Fault, Rank, Result,
    SimulatedMachine, Simulation, StateError, SymmetricBuffer, World, WorldBuilder,
};
use parking_lot::Mutex;

/// Returns a machine of four GPUs.
pub(crate) fn simulation() -> Simulation {
    Simulation::new(4)
}

/// Return codes of calls without an error: success, `ncclInProgress`, `CUDA_ERROR_NOT_READY`.
const NO_ERROR: [Option<i32>; 3] = [Some(0), Some(7), Some(600)];

/// Prefixes of functions that logs leave out: they make and free nothing, or only what ends with
/// its context.
const UNLOGGED: [&str; 31] = [
    "cuCtx",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDriver",
    "cuEvent",
    "cuFuncGet",
    "cuFuncLoad",
    "cuGet",
    "cuGraphGet",
    "cuInit",
    "cuMemGetInfo",
    "cuMemHostGet",
    "cuMemcpy",
    "cuMemset",
    "cuOccupancy",
    "cuStreamCreate",
    "cuStreamGetCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWait",
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommGetAsync",
    "ncclCommMemStats",
    "ncclCommQuery",
    "ncclCommUserRank",
    "ncclGet",
    "ncclLLA2A",
    "ncclParam",
    "ncclTeam",
    "ncclWinGet",
];

/// Returns a world of `n` ranks on a machine of four GPUs, which records its calls.
pub(crate) fn world(n: usize) -> World {
    world_on(simulation(), n)
}

/// Does the same as [`world`], with other settings of the machine.
pub(crate) fn world_on(simulation: Simulation, n: usize) -> World {
    recorded(World::builder().simulate(simulation), n)
}

/// Does the same as [`world`], without comparing collectives: to compare them, the ranks would wait
/// for each other on the host.
pub(crate) fn unchecked_world(n: usize) -> World {
    recorded(World::builder().checked(false).simulate(simulation()), n)
}

fn recorded(builder: WorldBuilder, n: usize) -> World {
    let world = builder.threads(n).unwrap();
    world.simulated_machine().unwrap().record_calls();
    world
}

/// Runs `f` on `n` ranks, and checks that all succeed and that no driver or NCCL call fails.
#[track_caller]
pub(crate) fn ranks<T: Send>(n: usize, f: impl Fn(&Rank) -> Result<T> + Sync) -> Ran<T> {
    ranks_on(simulation(), n, f)
}

/// Does the same as [`ranks`], with other settings of the machine.
#[track_caller]
pub(crate) fn ranks_on<T: Send>(
    simulation: Simulation,
    n: usize,
    f: impl Fn(&Rank) -> Result<T> + Sync,
) -> Ran<T> {
    let world = world_on(simulation, n);
    let results = world.run(f).unwrap();
    let failed = failed_calls(&world);
    assert!(failed.is_empty(), "{failed:#?}");
    Ran { results, world }
}

/// Returns the calls that returned an error.
pub(crate) fn failed_calls(world: &World) -> Vec<CallRecord> {
    let mut calls = world.simulated_machine().unwrap().calls();
    calls.retain(|call| !NO_ERROR.contains(&call.code));
    calls
}

/// The results of the ranks, and their world.
pub(crate) struct Ran<T> {
    pub(crate) results: Vec<T>,
    pub(crate) world: World,
}

/// Returns the calls for one GPU so far, from all threads: one line per call.
pub(crate) fn log_in(world: &World, gpu: usize) -> Vec<String> {
    log_on(world.simulated_machine().unwrap(), gpu)
}

/// Does the same as [`log_in`], for the rank's own GPU.
pub(crate) fn log_of(rank: &Rank) -> Vec<String> {
    log_on(rank.simulated_machine().unwrap(), rank.device())
}

fn log_on(machine: &SimulatedMachine, gpu: usize) -> Vec<String> {
    let skips = |call: &CallRecord| UNLOGGED.iter().any(|name| call.function.starts_with(name));
    let calls = machine.calls().into_iter();
    let calls = calls.filter(|call| call.gpu == Some(gpu) && !skips(call));
    calls.map(|call| call.to_string()).collect()
}

/// Runs `f`, and returns its result and the calls that this rank made meanwhile.
pub(crate) fn logged<T>(rank: &Rank, f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let before = log_of(rank).len();
    let result = f();
    (result, log_of(rank).split_off(before))
}

/// Runs `f`, and returns the calls that this rank made meanwhile, or the error of `f`.
pub(crate) fn calls(rank: &Rank, f: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let (result, log) = logged(rank, f);
    result.map(|()| log)
}

/// Runs `f`, and checks that this rank makes no call.
#[track_caller]
pub(crate) fn makes_no_calls(rank: &Rank, f: impl FnOnce()) {
    let ((), log) = logged(rank, f);
    assert!(log.is_empty(), "{log:?}");
}

/// Returns how often a log has a call of this function.
pub(crate) fn count(log: &[String], call: &str) -> usize {
    log.iter().filter(|line| line.split(' ').next() == Some(call)).count()
}

/// Makes calls of a function fail from now on, on one GPU or on all.
pub(crate) fn inject(
    world: &World,
    function: &'static str,
    gpu: impl Into<Option<usize>>,
    effect: Effect,
) {
    let fault = Fault { function, gpu: gpu.into(), nth: None, effect };
    world.simulated_machine().unwrap().inject(fault);
}

/// Returns the time since the world was created, on the simulated machine's clock.
pub(crate) fn now(world: &World) -> Duration {
    world.simulated_machine().unwrap().now()
}

/// Spawns a thread that runs `f` after a time on the simulated machine's clock, which advances only
/// when no other thread can run.
pub(crate) fn later<T: Send + 'static>(
    rank: &Rank,
    after: Duration,
    f: impl FnOnce() -> T + Send + 'static,
) -> Later<T> {
    let machine = rank.simulated_machine().unwrap().clone();
    let (result, ticket) = (Arc::default(), machine.ticket("another thread"));
    let later = Later { machine: machine.clone(), result: Arc::clone(&result) };
    std::thread::spawn(move || {
        let _attached = ticket.attach();
        sleep(&machine, after);
        let done = f();
        *result.lock() = Some(done);
    });
    later
}

/// A thread of [`later`].
pub(crate) struct Later<T> {
    machine: SimulatedMachine,
    result: Arc<Mutex<Option<T>>>,
}

impl<T> Later<T> {
    /// Waits for the thread, and returns the result of `f`.
    pub(crate) fn join(self) -> T {
        loop {
            // Taken first: if the thread ends after the check, which is an event, the wait returns.
            let seen = self.machine.event_count();
            if let Some(result) = self.result.lock().take() {
                return result;
            }
            self.machine.wait(seen, None).unwrap();
        }
    }
}

/// Sleeps for a time on the simulated machine's clock (see [`later`]).
pub(crate) fn pause(rank: &Rank, time: Duration) {
    sleep(rank.simulated_machine().unwrap(), time);
}

pub(crate) fn sleep(machine: &SimulatedMachine, time: Duration) {
    let end = machine.now() + time;
    while machine.now() < end {
        machine.wait(machine.event_count(), Some(end)).unwrap();
    }
}

/// Returns a buffer with these elements.
pub(crate) fn filled<T: Element>(comm: &Communicator, data: &[T]) -> Result<SymmetricBuffer<T>> {
    let buffer = comm.mem_alloc(data.len())?;
    buffer.copy_from_host(data)?;
    Ok(buffer)
}

/// Returns the elements of a buffer.
pub(crate) fn contents<T: Element + Default>(buffer: &impl Buffer<Element = T>) -> Vec<T> {
    let slice = buffer.device_slice();
    let mut data = vec![T::default(); slice.len()];
    slice.copy_to_host(&mut data).unwrap();
    data
}

#[track_caller]
pub(crate) fn assert_invalid<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::InvalidInput { .. })), "{result:?}");
}

#[track_caller]
pub(crate) fn assert_closed<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::Closed { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn assert_in_group<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::InGroup { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn assert_capturing<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::Capturing { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn assert_ended<T: std::fmt::Debug>(result: Result<T>, as_what: &str) {
    match result {
        Err(Error::State(StateError::CommunicatorEnded { how, .. })) if how == as_what => {}
        other => panic!("{other:?}, not {as_what}"),
    }
}
