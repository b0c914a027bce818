//! The settings of a simulated machine.

mod text;

use std::path::PathBuf;
use std::time::Duration;

use cuda_std::arch::Access;
use devcomm_types::GinConnectionType;

use crate::base::error::{Error, Result};
use crate::base::mapping::page_size;
use crate::base::mutation::Mutation;
use crate::base::schedule::{Lag, Schedule};

/// Maximum number of GPUs of a machine.
const MAX_GPUS: usize = 1 << 15;
/// The largest stack that a simulated thread can have.
const MAX_STACK: usize = 1 << 30;
/// The default settings.
const STACK_SIZE: usize = 64 << 10;
const TIME_LIMIT: Duration = Duration::from_secs(600);
const MULTIPROCESSORS: u32 = 132;
const COMPUTE_CAPABILITY: (u32, u32) = (9, 0);
/// The oldest GPUs that NCCL's device API runs on.
const OLDEST: (u32, u32) = (7, 0);
const MAX_MAJOR: u32 = 99;
/// The oldest GPUs with multicast.
const OLDEST_WITH_MULTICAST: (u32, u32) = (9, 0);
/// The largest depth of a PCT schedule.
const MAX_DEPTH: u32 = 1000;
/// The length of a run that PCT assumes by default.
const PCT_STEPS: u64 = 1000;

/// The settings of a simulated machine.
///
/// The text form, which `DEVCOMM_SIMULATE` takes, is the number of GPUs followed by any of the
/// settings: `4,team=2,multimem=0,network=rail,seed=7,preempt=1,multiprocessors=8`. It names the
/// settings that differ from the default ones, and is complete but for a mutation: a run with the
/// same settings is the same run.
///
/// ```
/// use devcomm_sim::Simulation;
///
/// let simulation: Simulation = "4,team=2".parse()?;
/// assert_eq!((simulation.gpus(), simulation.team()), (4, 2));
/// assert_eq!(Simulation::new(4).seed(17).pct(3).to_string(), "4,seed=17,pct=3");
/// # Ok::<(), devcomm_sim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "settings do nothing until a machine is made of them"]
pub struct Simulation {
    pub(crate) gpus: usize,
    pub(crate) team: Option<usize>,
    pub(crate) multimem: bool,
    pub(crate) network: GinConnectionType,
    pub(crate) seed: Option<u64>,
    pub(crate) preempt: bool,
    pub(crate) watch: bool,
    pub(crate) races: bool,
    pub(crate) weak: bool,
    pub(crate) flush: bool,
    pub(crate) mutation: Option<Mutation>,
    pub(crate) timeline: Option<PathBuf>,
    pub(crate) stack_size: usize,
    pub(crate) step_limit: Option<u64>,
    pub(crate) time_limit: Option<Duration>,
    /// The GPUs take these numbers in turn.
    pub(crate) multiprocessors: Vec<u32>,
    pub(crate) compute_capability: (u32, u32),
    pub(crate) schedule: Schedule,
    pub(crate) preemptions: Option<u32>,
}

impl From<usize> for Simulation {
    fn from(gpus: usize) -> Self {
        Self::new(gpus)
    }
}

impl Simulation {
    /// Returns the settings of a machine of `gpus` GPUs in one LSA team, with multicast.
    pub fn new(gpus: usize) -> Self {
        Self {
            gpus,
            team: None,
            multimem: true,
            network: GinConnectionType::Full,
            seed: None,
            preempt: false,
            watch: true,
            races: true,
            weak: false,
            flush: false,
            mutation: None,
            timeline: None,
            stack_size: STACK_SIZE,
            step_limit: None,
            time_limit: Some(TIME_LIMIT),
            multiprocessors: vec![MULTIPROCESSORS],
            compute_capability: COMPUTE_CAPABILITY,
            schedule: Schedule::Fair,
            preemptions: None,
        }
    }

    /// Sets the size of an LSA team, a divisor of the number of GPUs: consecutive GPUs that can
    /// access each other's memory. Other GPUs are connected by the network only. Default: all GPUs.
    pub fn team_size(mut self, gpus: usize) -> Self {
        self.team = Some(gpus);
        self
    }

    /// Sets whether LSA teams have multicast (NVLS). Default: yes, from compute capability 9.0
    /// on.
    pub fn multimem(mut self, multimem: bool) -> Self {
        self.multimem = multimem;
        self
    }

    /// Sets the GPUs that the network connects for GIN (PROXY back end): all
    /// ([`Full`](GinConnectionType::Full), the default), those with the same index in each team
    /// ([`Rail`](GinConnectionType::Rail)), or none ([`None`](GinConnectionType::None)).
    pub fn network(mut self, network: GinConnectionType) -> Self {
        self.network = network;
        self
    }

    /// Chooses a random order, determined by `seed`, of host threads, streams, blocks, threads and
    /// network deliveries. Default: a fixed order.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets whether GPU threads may be preempted between any two accesses through cuda_std, not
    /// only where they synchronise. This finds more errors, is several times slower, and implies
    /// [`watch`](Self::watch). Default: no.
    pub fn preempt(mut self, preempt: bool) -> Self {
        self.preempt = preempt;
        self
    }

    /// Sets whether each access through cuda_std is checked against the memory that its GPU can
    /// access. Without it, an invalid access faults or is not detected, and livelocks are detected
    /// later. Default: yes.
    pub fn watch(mut self, watch: bool) -> Self {
        self.watch = watch;
        self
    }

    /// Writes a timeline of the run to a file, when the machine ends or fails: what the ranks' host
    /// threads, streams and blocks ran and waited for, and what they sent over the network. It is a
    /// picture if the name ends in `.svg`, otherwise a Chrome trace, which Perfetto opens. Default:
    /// none.
    ///
    /// Its time is in rounds of the GPUs, in each of which every ready block runs for a turn: it
    /// shows order and overlap, not a GPU's durations. In the text form the name has no comma.
    pub fn timeline(mut self, file: impl Into<PathBuf>) -> Self {
        self.timeline = Some(file.into());
        self
    }

    /// Sets whether races are detected: accesses to the same memory that nothing orders, one of
    /// them a write. Needs [`watch`](Self::watch). Default: yes.
    pub fn races(mut self, races: bool) -> Self {
        self.races = races;
        self
    }

    /// Sets whether atomic loads may see old values, where PTX's memory model allows it: values
    /// that other threads have replaced, unless the replacement happened before the load. Loads of
    /// more than eight bytes may see halves of different ages. With a seed, TMA, bulk copies and
    /// `cp.async` read their source, and write their target, at any time until the wait for that,
    /// and copies and memsets in streams land late. This needs a seed or choices, and
    /// [`races`](Self::races). Default: no.
    pub fn weak(mut self, weak: bool) -> Self {
        self.weak = weak;
        self
    }

    /// Sets whether it is an error if a kernel ends with a put or get that it has not flushed.
    /// Kernels may rely on a later kernel's flush, or on the signal of a put's target. Otherwise
    /// [`Activity::unflushed`](crate::Activity::unflushed) lists them. Default: no.
    pub fn flush(mut self, flush: bool) -> Self {
        self.flush = flush;
        self
    }

    /// Changes what kernels do at one line, to test that a bug there is found.
    pub fn mutation(mut self, mutation: Mutation) -> Self {
        self.mutation = Some(mutation);
        self
    }

    /// Sets the stack size of a simulated thread in bytes; memory is committed on use. Default: 64
    /// KiB.
    pub fn stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = bytes;
        self
    }

    /// Fails the kernels with [`Error::Limit`] after this number of thread switches since the GPUs
    /// were last idle. Default: no limit.
    pub fn step_limit(mut self, steps: u64) -> Self {
        self.step_limit = Some(steps);
        self
    }

    /// Fails the kernels with [`Error::Limit`] when they have run for this long. On Linux on x86-64
    /// and aarch64, a signal also stops a kernel that loops without calls into cuda_std or
    /// nccl_device, after about 3 seconds of processor time. In the text form, `seconds=0` means no
    /// limit, and no such signal. Default: ten minutes.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Sets the number of multiprocessors per GPU, each for up to 2048 threads (1536 or 1024 with
    /// some compute capabilities) and 32 blocks. Default: 132, as on an H200.
    pub fn multiprocessors(self, multiprocessors: u32) -> Self {
        self.multiprocessors_in_turn([multiprocessors])
    }

    /// Sets the number of multiprocessors of GPUs that differ: they take these numbers in turn. In
    /// the text form: `multiprocessors=132/114`.
    pub fn multiprocessors_in_turn(mut self, all: impl IntoIterator<Item = u32>) -> Self {
        self.multiprocessors = all.into_iter().collect();
        self
    }

    /// Returns the number of multiprocessors of a GPU.
    pub(crate) fn multiprocessors_of(&self, gpu: usize) -> u32 {
        self.multiprocessors[gpu % self.multiprocessors.len()]
    }

    /// Sets the compute capability that the GPUs report, at least 7.0, as `(major, minor)`.
    /// Default: 9.0. In the text form: `compute_capability=8.9`.
    ///
    /// Before 9.0 there is no multicast, and launches with clusters and dependent launches are
    /// refused, as on a GPU. A multiprocessor holds as many threads as one of that compute
    /// capability. All else is as on Hopper: other resources, and the instructions of a kernel,
    /// whatever architecture it is compiled for.
    ///
    /// ```
    /// let simulation = devcomm_sim::Simulation::new(2).compute_capability(8, 9);
    /// assert_eq!(simulation.to_string(), "2,compute_capability=8.9");
    /// ```
    pub fn compute_capability(mut self, major: u32, minor: u32) -> Self {
        self.compute_capability = (major, minor);
        self
    }

    /// Returns the largest number of threads on a multiprocessor.
    pub(crate) fn multiprocessor_threads(&self) -> u32 {
        match self.compute_capability {
            (7, 5) => 1024,
            (8, 6 | 7 | 9) | (12, _) => 1536,
            _ => 2048,
        }
    }

    /// Runs warps by random priorities, determined by the seed (0 if none is set): *probabilistic
    /// concurrency testing* (PCT, Burckhardt et al., ASPLOS 2010). The ready warp of the highest
    /// priority runs, and at `depth - 1` random steps the running warp's priority becomes the
    /// lowest. A bug of depth `d` is one that `d` ordered pairs of accesses expose; a schedule of
    /// that depth finds it with a probability of at least 1 / (n k^(d-1)), for n warps and a run of
    /// k steps, where random orders may never find it. Threads that only poll wait until another
    /// one has made progress.
    ///
    /// Implies [`preempt`](Self::preempt); a later `preempt(false)` keeps the switches to where
    /// threads synchronise.
    ///
    /// ```
    /// let simulation = devcomm_sim::Simulation::new(4).seed(17).pct(3).pct_steps(812);
    /// assert_eq!(simulation.to_string(), "4,seed=17,pct=3/812");
    /// ```
    pub fn pct(mut self, depth: u32) -> Self {
        self.schedule = Schedule::Pct { depth, steps: PCT_STEPS };
        self.preempt = true;
        self
    }

    /// Sets, after [`pct`](Self::pct), the number of thread switches of a run, so that priorities
    /// change all over the run. Default: 1000. In the text form: `pct=3/5000`.
    pub fn pct_steps(mut self, run: u64) -> Self {
        if let Schedule::Pct { steps, .. } = &mut self.schedule {
            *steps = run;
        }
        self
    }

    /// Chooses an unfair schedule: a thread, warp, block or rank, chosen by the seed (0 if none is
    /// set), runs only when nothing else can make progress, neither a kernel, nor the network, nor
    /// a host thread. The others run in random order. So another rank may be in its next launch
    /// while one is still in this one, where missing barriers at a kernel's begin and end show.
    ///
    /// ```
    /// use devcomm_sim::{Lag, Simulation};
    ///
    /// assert_eq!(Simulation::new(4).seed(1).lag(Lag::Rank).to_string(), "4,seed=1,lag=rank");
    /// ```
    pub fn lag(mut self, what: Lag) -> Self {
        self.schedule = Schedule::Lag(what);
        self
    }

    /// Follows a list of choices: before each step of a thread, a choice is the index of the next
    /// thread among those that can run, where 0 is the thread that ran last. After the list's end
    /// each choice is 0. So a run can be repeated with another branch:
    /// [`Activity::choices`](crate::Activity::choices) has the choices of a run. A step ends before
    /// the thread's next access to memory. Threads that have polled in vain twice cannot run until
    /// something has changed. In the text form, `choices=3:1-7:2` means that choice 3 is 1, choice
    /// 7 is 2, and all others are 0.
    ///
    /// Implies [`preempt`](Self::preempt), as [`pct`](Self::pct) does.
    ///
    /// ```
    /// let simulation = devcomm_sim::Simulation::new(2).choices(&[0, 0, 0, 1, 0, 0, 0, 2]);
    /// assert_eq!(simulation.to_string(), "2,choices=3:1-7:2");
    /// assert_eq!("2,choices=3:1-7:2".parse::<devcomm_sim::Simulation>()?, simulation);
    /// # Ok::<(), devcomm_sim::Error>(())
    /// ```
    pub fn choices(mut self, choices: &[u32]) -> Self {
        let taken = choices.iter().rposition(|choice| *choice != 0).map_or(0, |last| last + 1);
        self.schedule = Schedule::Choices(choices[..taken].to_vec());
        self.preempt = true;
        self
    }

    /// Sets, with [`choices`](Self::choices), how many times a thread that could go on may be
    /// preempted; there are no alternatives after that. Most bugs need one or two. Default: no
    /// limit.
    pub fn preemptions(mut self, limit: u32) -> Self {
        self.preemptions = Some(limit);
        self
    }

    /// Returns the seed, if the order is random.
    #[must_use]
    pub fn random_seed(&self) -> Option<u64> {
        let needs_one = matches!(self.schedule, Schedule::Pct { .. } | Schedule::Lag(_));
        self.seed.or(needs_one.then_some(0))
    }

    /// Returns whether atomic loads may see old values, and copies land late.
    #[must_use]
    pub fn is_weak(&self) -> bool {
        self.weak
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Returns the size of an LSA team.
    #[must_use]
    pub fn team(&self) -> usize {
        self.team.unwrap_or(self.gpus)
    }

    /// Returns whether threads are preempted before an access of this kind. With a list of choices
    /// and the detection of races, they are not preempted before a plain access: its order with
    /// others does not matter unless it races, and then every order shows the race.
    #[inline]
    pub(crate) fn preempts(&self, access: Access) -> bool {
        let plain = matches!(access, Access::Read | Access::Write);
        self.preempt && !(plain && self.races && matches!(self.schedule, Schedule::Choices(_)))
    }

    /// Validates the settings; returns them with what they imply.
    pub(crate) fn checked(&self) -> Result<Self> {
        let refuse = |reason: String| Err(Error::Settings(reason));
        let (gpus, team) = (self.gpus, self.team());
        if gpus == 0 || gpus > MAX_GPUS {
            return refuse(format!("{gpus} GPUs, but 1 to {MAX_GPUS} are possible"));
        }
        if team == 0 || !gpus.is_multiple_of(team) {
            return refuse(format!("{gpus} GPUs cannot be divided into teams of {team}"));
        }
        use GinConnectionType as N;
        if !matches!(self.network, N::None | N::Full | N::Rail) {
            return refuse(format!(
                "network {} is not possible: use FULL, RAIL or NONE",
                self.network
            ));
        }
        let (stack, least) = (self.stack_size, 4 * page_size());
        if stack < least || stack > MAX_STACK {
            return refuse(format!(
                "stacks of {stack} bytes, but {least} to {MAX_STACK} are possible"
            ));
        }
        if self.multiprocessors.is_empty() || self.multiprocessors.contains(&0) {
            return refuse("a GPU without multiprocessors".to_owned());
        }
        let (major, minor) = self.compute_capability;
        if self.compute_capability < OLDEST || major > MAX_MAJOR || minor > 9 {
            return refuse(format!(
                "compute capability {major}.{minor}, but 7.0 to {MAX_MAJOR}.9 are possible"
            ));
        }
        match self.schedule {
            Schedule::Pct { depth, steps } if !(1..=MAX_DEPTH).contains(&depth) || steps == 0 => {
                return refuse(format!(
                    "a PCT schedule of depth {depth} in {steps} steps: the depth is 1 to \
                     {MAX_DEPTH}, and a run has a step"
                ));
            }
            Schedule::Choices(_) if self.seed.is_some() => {
                return refuse("choices and a seed, but only one of them can decide".to_owned());
            }
            Schedule::Choices(_) => {}
            _ if self.preemptions.is_some() => {
                return refuse("a limit of preemptions, which is for choices only".to_owned());
            }
            _ => {}
        }
        let (watch, seed) = (self.watch || self.preempt, self.random_seed());
        let races = self.races && watch;
        let decides = seed.is_some() || matches!(self.schedule, Schedule::Choices(_));
        if self.weak && !(races && decides) {
            return refuse(
                "weak loads need the detection of races, and a seed or choices".to_owned(),
            );
        }
        let multimem = self.multimem && self.compute_capability >= OLDEST_WITH_MULTICAST;
        Ok(Self { multimem, watch, seed, races, ..self.clone() })
    }
}
