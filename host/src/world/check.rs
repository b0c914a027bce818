//! Runs a program under many schedules on simulated GPUs: [`check`] and its variants.

mod attribute;
mod schedules;

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use devcomm_sim::{Activity, Simulation};

pub use self::attribute::run_test;
use self::schedules::{Plan, Series};
use super::{Rank, World};
use crate::error::{Error, Result};

/// Runs `f` on every rank of a simulated machine, once in a fixed order and once in the order in
/// which threads are preempted at each access to memory. `machine` is the number of ranks, or the
/// machine's settings.
///
/// ```
/// devcomm_host::check(2, |rank| rank.communicator()?.window::<u32>(16).map(drop));
/// ```
///
/// # Panics
///
/// If a rank fails, or the simulator finds an error. The message ends with a line that runs the
/// same schedule again: see [`replay`].
#[track_caller]
pub fn check<T, E, F>(machine: impl Into<Simulation>, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    Check::new(machine).run(f);
}

/// Does the same as [`check`], in `schedules` random orders.
///
/// ```
/// use devcomm_host::{Simulation, check_random};
///
/// check_random(Simulation::new(4).team_size(2), 10, |rank| rank.barrier());
/// ```
///
/// # Panics
///
/// It panics as [`check`].
#[track_caller]
pub fn check_random<T, E, F>(machine: impl Into<Simulation>, schedules: u64, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    Check::new(machine).random(schedules).run(f);
}

/// Does the same as [`check`], in `schedules` orders by random priorities that change `depth - 1`
/// times: see [`Simulation::pct`].
///
/// ```
/// devcomm_host::check_pct(2, 10, 3, |rank| rank.barrier());
/// ```
///
/// # Panics
///
/// It panics as [`check`].
#[track_caller]
pub fn check_pct<T, E, F>(machine: impl Into<Simulation>, schedules: u64, depth: u32, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    Check::new(machine).pct(schedules, depth).run(f);
}

/// Does the same as [`check`], in every order of the kernels' accesses to memory; returns their
/// number. For protocols of a few threads with a few accesses each: see [`Check::exhaustive`].
///
/// ```
/// use devcomm_host::{Simulation, check_exhaustive};
///
/// // A program without kernels has one order.
/// assert_eq!(check_exhaustive(2, 1000, |rank| rank.barrier()), 1);
/// // Only orders in which threads are preempted at most twice.
/// check_exhaustive(Simulation::new(2).preemptions(2), 1000, |rank| rank.barrier());
/// ```
///
/// # Panics
///
/// It panics as [`check`]; if there are more than `limit` orders.
#[track_caller]
pub fn check_exhaustive<T, E, F>(machine: impl Into<Simulation>, limit: u64, f: F) -> u64
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    Check::new(machine).exhaustive(limit).run(f)
}

/// Runs one schedule again. `settings` is the [text form](Simulation) of a machine's settings, as
/// the message of a failed check has it.
///
/// ```
/// devcomm_host::replay("4,seed=17,pct=3", |rank| rank.barrier());
/// ```
///
/// # Panics
///
/// It panics as [`check`], with the same message if the program depends on the schedule alone; for
/// settings that are not valid.
#[track_caller]
pub fn replay<T, E, F>(settings: &str, f: F)
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    let simulation = settings.parse().map_err(|error: devcomm_sim::Error| error.to_string());
    match simulation.and_then(|simulation| run_once(&simulation, &f)) {
        Ok(Ok(_)) => {}
        Ok(Err(report)) => panic!("{report}"),
        Err(refusal) => panic!("{refusal}"),
    }
}

/// Schedules to run a program under, on a simulated machine.
///
/// With the environment variable `DEVCOMM_SCHEDULES=1000`, [`random`](Self::random),
/// [`pct`](Self::pct) and [`lagging`](Self::lagging) run 1000 schedules each, whatever number they
/// are given. Seeds count up from that of the settings, or from 0.
///
/// ```
/// use devcomm_host::{Check, Simulation};
///
/// let machine = Simulation::new(4).team_size(2);
/// let schedules = Check::new(machine).random(5).pct(5, 3).lagging(4).run(|rank| rank.barrier());
/// assert_eq!(schedules, 14);
/// ```
#[derive(Clone, Debug)]
#[must_use = "a check does nothing until it runs"]
pub struct Check {
    simulation: Simulation,
    series: Vec<Series>,
}

impl Check {
    /// Returns a check on a machine of this many GPUs, or with these settings.
    pub fn new(machine: impl Into<Simulation>) -> Self {
        Self { simulation: machine.into(), series: Vec::new() }
    }

    /// Adds two schedules: a fixed order, and one that preempts threads at each access. The default
    /// if nothing else is added. Without a seed they run without [`weak`](Simulation::weak) loads,
    /// which need one; if there are no other schedules, a note on standard error says so.
    pub fn in_order(self) -> Self {
        self.with_series(Series::InOrder)
    }

    /// Adds random orders.
    pub fn random(self, schedules: u64) -> Self {
        self.with_series(Series::Random(schedules))
    }

    /// Adds orders by random priorities: see [`Simulation::pct`].
    pub fn pct(self, schedules: u64, depth: u32) -> Self {
        self.with_series(Series::Pct { schedules, depth })
    }

    /// Adds unfair orders, in which a thread, a warp, a block or a rank, in turn, lags far behind:
    /// see [`Simulation::lag`].
    pub fn lagging(self, schedules: u64) -> Self {
        self.with_series(Series::Lagging(schedules))
    }

    /// Adds every order of the kernels' accesses to memory and of the network's deliveries, by
    /// depth-first search, with host threads in a fixed order and as early as possible. The number
    /// of orders grows exponentially with the number of accesses; it is polynomial with a limit of
    /// [`preemptions`](Simulation::preemptions). It is an error if there are more than `limit`.
    pub fn exhaustive(self, limit: u64) -> Self {
        self.with_series(Series::Exhaustive { limit })
    }

    fn with_series(mut self, series: Series) -> Self {
        self.series.push(series);
        self
    }

    /// Runs `f` on every rank, under each schedule; returns the number of schedules. Notes on
    /// standard error name the puts and gets that kernels have left [unflushed](Simulation::flush),
    /// and the kernels that use peers' memory and were launched once: a barrier at their start that
    /// is missing shows only if they are launched again on the same memory.
    ///
    /// # Panics
    ///
    /// At the first schedule in which a rank fails or the simulator finds an error, with a message
    /// that ends with the [`replay`] of that schedule; for settings that are not valid.
    #[track_caller]
    pub fn run<T, E, F>(&self, f: F) -> u64
    where
        F: Fn(&Rank) -> Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let stop = |report: CheckReport| Err(report.to_string());
        self.each(f, stop).unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Does the same as [`run`](Self::run), but goes on after schedules that fail, and returns
    /// their reports: one for each, also if they have found the same. A series of
    /// [`exhaustive`](Self::exhaustive) orders ends with its first report.
    ///
    /// ```
    /// use devcomm_host::{Check, Error, Simulation};
    ///
    /// let check = Check::new(Simulation::new(2)).random(3);
    /// assert!(check.reports(|rank| rank.barrier())?.is_empty());
    /// let reports = check.reports(|rank| match rank.rank() {
    ///     0 => Ok(()),
    ///     _ => rank.communicator()?.barrier(),
    /// })?;
    /// assert_eq!(reports.len(), 3);
    /// assert_eq!(reports[2].schedule.to_string(), "2,seed=2");
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for settings that are not valid, for more exhaustive orders than
    /// their limit, and for a program that does not repeat itself.
    pub fn reports<T, E, F>(&self, f: F) -> Result<Vec<CheckReport>>
    where
        F: Fn(&Rank) -> Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let mut reports = Vec::new();
        let collect = |report| {
            reports.push(report);
            Ok(())
        };
        self.each(f, collect).map_err(Error::invalid)?;
        Ok(reports)
    }

    /// Runs the schedules; `on_failure` decides whether more of them run after one that has failed.
    fn each<T, E, F>(
        &self,
        f: F,
        mut on_failure: impl FnMut(CheckReport) -> Result<(), String>,
    ) -> Result<u64, String>
    where
        F: Fn(&Rank) -> Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let mut notes = BTreeSet::new();
        let mut run = |simulation: &Simulation| match run_once(simulation, &f)? {
            Ok(activity) => {
                notes.extend(notes_of(&activity));
                Ok(Some(activity))
            }
            Err(report) => on_failure(report).map(|()| None),
        };
        let plan = Plan::new(&self.simulation, &self.series)?;
        let ran = plan.run(&mut run)?;
        notes.extend(plan.note().map(str::to_owned));
        notes.into_iter().for_each(print_note);
        Ok(ran)
    }
}

/// Prints a note, once in a process, directly to standard error: the test harness shows what a test
/// prints only if it fails.
fn print_note(note: String) {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let text = format!("note: {note}\n");
    if PRINTED.lock().unwrap_or_else(PoisonError::into_inner).insert(note) {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

/// Returns notes on a run: what may be wrong in it, and what it cannot show.
fn notes_of(activity: &Activity) -> impl Iterator<Item = String> + '_ {
    let once = activity.launched_once.iter().map(|kernel| {
        format!(
            "{kernel} uses peers' memory and was launched once: if it needs a barrier at its start \
             and has none, that shows only in a second launch on the same memory"
        )
    });
    activity.unflushed.iter().map(ToString::to_string).chain(once)
}

/// What one schedule of a [`Check`] has found. Its text ends with the [`replay`] of the schedule.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckReport {
    /// The schedule's settings.
    pub schedule: Simulation,
    /// The message of the rank that has failed first; `None` if none has.
    pub message: Option<String>,
    /// What the simulator has found; `None` if only a rank has failed.
    pub error: Option<Arc<devcomm_sim::Error>>,
}

impl Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = self.error.as_ref().map(ToString::to_string);
        match (&self.message, error) {
            (Some(message), Some(error)) if !message.contains(&error) => {
                write!(f, "{message}\n{error}")
            }
            (Some(message), _) => f.write_str(message),
            (None, error) => f.write_str(&error.unwrap_or_default()),
        }?;
        let schedule = &self.schedule;
        write!(f, "\n\nTo run this schedule again:\n    devcomm::replay(\"{schedule}\", |rank| ..)")
    }
}

/// Runs `f` under one schedule; the outer error is the message for settings that are not valid.
fn run_once<T, E, F>(
    simulation: &Simulation,
    f: &F,
) -> Result<Result<Activity, CheckReport>, String>
where
    F: Fn(&Rank) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    let world = World::builder().simulate(simulation.clone()).threads(simulation.gpus());
    let world = world.map_err(|error| error.to_string())?;
    let ran = world.run(f);
    // Never `None`, as the world was made with a simulation.
    let machine = world.simulated_machine();
    // The simulator may have found an error that no rank has returned.
    let error = machine.and_then(devcomm_sim::Machine::failure);
    let message = ran.err().map(|error| error.to_string());
    if error.is_none() && message.is_none() {
        return Ok(Ok(machine.map(devcomm_sim::Machine::activity).unwrap_or_default()));
    }
    Ok(Err(CheckReport { schedule: simulation.clone(), message, error }))
}
