//! Running ranks: all as threads of this process, or one as this process.

use std::any::Any;
use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use super::rendezvous::{Hub, JoinedWorld, Rendezvous, ThreadTransport, host_name};
use crate::error::{Error, Result, WorldError};
use crate::machine::{Machine, message};

/// Runs `f` in one thread per rank; calls wait for other ranks for at most `deadline`. The error is
/// that of the rank that failed first.
pub(crate) fn run_threads<T, E>(
    machine: &Machine,
    n: usize,
    deadline: Option<Duration>,
    f: impl Fn(&Rendezvous) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<Error> + Send,
{
    let hub = Arc::new(Hub::new(machine.clone(), n, deadline));
    let hosts = vec![host_name(); n];
    // This thread waits for the ranks below. On a simulated machine it must do so as one of the
    // threads that the machine schedules, so that the ranks run meanwhile.
    let _entered = machine.ticket("the world").enter();
    let running = AtomicUsize::new(0);
    let mut results: Vec<Result<T, E>> = std::thread::scope(|scope| {
        let start = |rank| {
            let ticket = machine.ticket(&format!("rank {rank}"));
            let transport = Arc::new(ThreadTransport::new(Arc::clone(&hub), rank));
            let rendezvous = Rendezvous::new(JoinedWorld { rank, hosts: hosts.clone(), transport });
            let f = &f;
            let name = format!("devcomm-rank-{rank}");
            let running = RunningRank::new(&running);
            std::thread::Builder::new().name(name).spawn_scoped(scope, move || {
                let _entered = ticket.enter();
                // The count falls before `_entered` is dropped, which wakes the world's thread: it
                // then reads the count.
                let _running = running;
                f(&rendezvous)
            })
        };
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                start(rank).map_err(|error| {
                    let why = error.to_string();
                    hub.mark_lost(rank, &why);
                    Error::World(WorldError::SpawnFailed { rank, why })
                })
            })
            .collect();
        machine.wait_for_threads(|| running.load(Ordering::Acquire) == 0);
        let join = |(rank, thread): (usize, Result<ScopedJoinHandle<'_, _>>)| {
            // `run_rank` catches panics of the rank's function; this one is of a destructor.
            thread?.join().unwrap_or_else(|panic| Err(panicked(rank, &*panic).into()))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    if let Some(first) = hub.health().lost_rank()
        && results.get(first).is_some_and(Result::is_err)
    {
        // `collect` returns the first error of the results.
        results.swap(0, first);
    }
    results.into_iter().collect()
}

/// Counts a rank as running until it is dropped. The count orders nothing that the ranks have
/// written: joining their threads does.
struct RunningRank<'a>(&'a AtomicUsize);

impl<'a> RunningRank<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for RunningRank<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

thread_local! {
    /// The number of the rank whose function this thread runs; `None` on other threads.
    static RUNS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Fails on a thread that runs the function of a rank: such a thread cannot make or run another
/// world, and wait for its ranks. On a simulated machine it would leave its own world's machine, in
/// which the other ranks wait for it.
///
/// # Errors
///
/// [`Error::InvalidInput`].
pub(super) fn refuse_within_rank() -> Result<()> {
    match RUNS.get() {
        None => Ok(()),
        Some(rank) => Err(Error::invalid(format!(
            "a world cannot be made or run within the function of a world's rank, here rank \
             {rank}; run it before or after"
        ))),
    }
}

/// Runs one rank: makes it, runs its function, waits for the other ranks, and drops it. If one of
/// these steps fails, the other ranks get the error before the rank is dropped: their calls that
/// wait for it fail, so that its destructors do not wait for them.
pub(crate) fn run_rank<R, T, E>(
    rendezvous: &Rendezvous,
    make: impl FnOnce() -> Result<R>,
    f: impl Fn(&R) -> Result<T, E>,
) -> Result<T, E>
where
    E: From<Error> + Display,
{
    let fail = |error: &E| rendezvous.fail(&error.to_string());
    let rank = caught(rendezvous, || make().map_err(E::from)).inspect_err(fail)?;
    RUNS.set(Some(rendezvous.rank()));
    let result = caught(rendezvous, || f(&rank));
    RUNS.set(None);
    let result = result.inspect_err(fail)?;
    // The drop of the rank destroys its communicator, which is collective. So this first waits
    // until no rank uses the communicator any more, or one is lost.
    let finish = || rendezvous.finish().map_err(E::from);
    caught(rendezvous, finish).inspect_err(fail)?;
    drop(rank);
    Ok(result)
}

/// Runs a step of a rank, and returns a panic as an error. This is unwind safe: after a panic, of
/// what belongs to the rank only the destructors run.
fn caught<T, E: From<Error>>(
    rendezvous: &Rendezvous,
    part: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(part))
        .unwrap_or_else(|panic| Err(panicked(rendezvous.rank(), &*panic).into()))
}

fn panicked(rank: usize, panic: &(dyn Any + Send)) -> Error {
    Error::World(WorldError::RankPanicked { rank, message: message(panic) })
}
