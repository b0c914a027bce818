//! Worlds, the record of their calls, and what tests share.

use std::sync::Arc;
use std::time::Duration;

use devcomm_host::{
    Buffer, CallRecord, Communicator, Effect, Element, Error, Fault, Rank, Result,
    SimulatedMachine, Simulation, StateError, SymmetricBuffer, World,
};
use parking_lot::Mutex;

/// A machine of more GPUs than most worlds use.
pub(crate) fn simulation() -> Simulation {
    Simulation::new(4)
}

/// What calls return that do as they are asked: they have succeeded, continue in the background, or
/// are asked whether something is ready that is not.
const FINE: [Option<i32>; 3] = [Some(0), Some(7), Some(600)];

/// Calls that change nothing, or are about what ends with their context. Their names begin so.
const ASIDE: [&str; 30] = [
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

/// `n` ranks on the first GPUs of a machine of four, which records its calls.
pub(crate) fn world(n: usize) -> World {
    world_on(simulation(), n)
}

/// The same with settings.
pub(crate) fn world_on(simulation: Simulation, n: usize) -> World {
    let world = World::builder().simulate(simulation).threads(n).unwrap();
    world.simulated_machine().unwrap().record_calls();
    world
}

/// Runs `n` ranks, which all come to the same, and whose every call does as it is asked: none is on
/// something that has ended, and ranks that make a call together make the same.
#[track_caller]
pub(crate) fn ranks<T: Send>(n: usize, f: impl Fn(&Rank) -> Result<T> + Sync) -> Ran<T> {
    ranks_on(simulation(), n, f)
}

/// The same with settings.
#[track_caller]
pub(crate) fn ranks_on<T: Send>(
    simulation: Simulation,
    n: usize,
    f: impl Fn(&Rank) -> Result<T> + Sync,
) -> Ran<T> {
    let world = world_on(simulation, n);
    let results = world.run(f).unwrap();
    let refused = refused_calls(&world);
    assert!(refused.is_empty(), "{refused:#?}");
    Ran { results, world }
}

/// Calls that did not do as they were asked.
pub(crate) fn refused_calls(world: &World) -> Vec<CallRecord> {
    let mut calls = world.simulated_machine().unwrap().calls();
    calls.retain(|call| !FINE.contains(&call.code));
    calls
}

/// What ranks came to.
pub(crate) struct Ran<T> {
    pub(crate) results: Vec<T>,
    pub(crate) world: World,
}

/// What was done for one GPU's rank so far, on whatever thread: a line a call.
pub(crate) fn log_in(world: &World, gpu: usize) -> Vec<String> {
    log_on(world.simulated_machine().unwrap(), gpu)
}

/// The same, as the rank sees it.
pub(crate) fn log_of(rank: &Rank) -> Vec<String> {
    log_on(rank.simulated_machine().unwrap(), rank.device())
}

fn log_on(machine: &SimulatedMachine, gpu: usize) -> Vec<String> {
    let is_aside = |call: &CallRecord| ASIDE.iter().any(|name| call.function.starts_with(name));
    let calls = machine.calls().into_iter();
    let calls = calls.filter(|call| call.gpu == Some(gpu) && !is_aside(call));
    calls.map(|call| call.to_string()).collect()
}

/// Runs `f` and returns what this rank has done meanwhile.
pub(crate) fn logged<T>(rank: &Rank, f: impl FnOnce() -> T) -> (T, Vec<String>) {
    let before = log_of(rank).len();
    let result = f();
    (result, log_of(rank).split_off(before))
}

/// Runs `f`, and returns what this rank has done meanwhile if it succeeds.
pub(crate) fn done(rank: &Rank, f: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let (result, log) = logged(rank, f);
    result.map(|()| log)
}

/// Runs `f`, for which this rank does nothing.
#[track_caller]
pub(crate) fn calls_nothing(rank: &Rank, f: impl FnOnce()) {
    let ((), log) = logged(rank, f);
    assert!(log.is_empty(), "{log:?}");
}

/// How often a function was called.
pub(crate) fn count(log: &[String], call: &str) -> usize {
    log.iter().filter(|line| line.split(' ').next() == Some(call)).count()
}

/// Has calls of a function go wrong from now on, on one GPU or on all.
pub(crate) fn inject(
    world: &World,
    function: &'static str,
    gpu: impl Into<Option<usize>>,
    effect: Effect,
) {
    let fault = Fault { function, gpu: gpu.into(), nth: None, effect };
    world.simulated_machine().unwrap().inject(fault);
}

/// The time since the world was made, by the machine's clock.
pub(crate) fn now(world: &World) -> Duration {
    world.simulated_machine().unwrap().now()
}

/// A thread of the machine that does something when a rank has waited for so long, by the machine's
/// clock: when all that can continue without it has.
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

/// A thread that was started.
pub(crate) struct Later<T> {
    machine: SimulatedMachine,
    result: Arc<Mutex<Option<T>>>,
}

impl<T> Later<T> {
    /// Waits for its end.
    pub(crate) fn join(self) -> T {
        loop {
            let seen = self.machine.event_count();
            if let Some(result) = self.result.lock().take() {
                return result;
            }
            self.machine.wait(seen, None).unwrap();
        }
    }
}

/// Waits for so long, by the machine's clock: until all that can continue without has.
pub(crate) fn pause(rank: &Rank, time: Duration) {
    sleep(rank.simulated_machine().unwrap(), time);
}

fn sleep(machine: &SimulatedMachine, time: Duration) {
    let end = machine.now() + time;
    while machine.now() < end {
        machine.wait(machine.event_count(), Some(end)).unwrap();
    }
}

/// A buffer with these elements.
pub(crate) fn filled<T: Element>(comm: &Communicator, data: &[T]) -> Result<SymmetricBuffer<T>> {
    let buffer = comm.mem_alloc(data.len())?;
    buffer.copy_from_host(data)?;
    Ok(buffer)
}

/// What is in a buffer.
pub(crate) fn contents<T: Element + Default>(buffer: &impl Buffer<Element = T>) -> Vec<T> {
    let slice = buffer.device_slice();
    let mut data = vec![T::default(); slice.len()];
    slice.copy_to_host(&mut data).unwrap();
    data
}

#[track_caller]
pub(crate) fn is_invalid<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::InvalidInput { .. })), "{result:?}");
}

#[track_caller]
pub(crate) fn is_closed<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::Closed { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn is_in_group<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::InGroup { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn is_capturing<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::State(StateError::Capturing { .. }))), "{result:?}");
}

#[track_caller]
pub(crate) fn is_ended<T: std::fmt::Debug>(result: Result<T>, as_what: &str) {
    match result {
        Err(Error::State(StateError::CommunicatorEnded { how, .. })) if how == as_what => {}
        other => panic!("{other:?}, not {as_what}"),
    }
}
