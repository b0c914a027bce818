//! The settings of a simulated machine.

use std::str::FromStr;
use std::time::Duration;

use devcomm_types::GinConnectionType;

use crate::error::{Error, Result};
use crate::memory::page_size;

/// Maximum number of GPUs of a machine.
const MAX_GPUS: usize = 1 << 15;
/// The largest stack that a simulated thread can have.
const MAX_STACK: usize = 1 << 30;

/// The settings of a simulated machine.
///
/// The text form, which `DEVCOMM_SIMULATE` takes, is the number of GPUs followed by any of the
/// settings: `4,team=2,multimem=0,network=rail,seed=7,preempt=1,multiprocessors=8`.
///
/// ```
/// use devcomm_sim::Simulation;
///
/// let simulation: Simulation = "4,team=2".parse()?;
/// assert_eq!((simulation.gpus(), simulation.team()), (4, 2));
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
    pub(crate) stack_size: usize,
    pub(crate) step_limit: Option<u64>,
    pub(crate) time_limit: Option<Duration>,
    pub(crate) multiprocessors: u32,
}

impl Simulation {
    /// A machine of `gpus` GPUs in one LSA team, with multicast.
    pub fn new(gpus: usize) -> Self {
        Self {
            gpus,
            team: None,
            multimem: true,
            network: GinConnectionType::Full,
            seed: None,
            preempt: false,
            watch: true,
            stack_size: 64 << 10,
            step_limit: None,
            time_limit: Some(Duration::from_secs(600)),
            multiprocessors: 132,
        }
    }

    /// Size of an LSA team, a divisor of the number of GPUs: consecutive GPUs that can access each
    /// other's memory. Other GPUs are connected by the network only. Default: all GPUs.
    pub fn team_size(mut self, gpus: usize) -> Self {
        self.team = Some(gpus);
        self
    }

    /// Whether LSA teams have multicast (NVLS). Default: yes.
    pub fn multimem(mut self, multimem: bool) -> Self {
        self.multimem = multimem;
        self
    }

    /// The GPUs that the network connects for GIN (PROXY back end): all
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

    /// Whether GPU threads may be preempted between any two accesses through cuda_std, not only
    /// where they synchronise. Several times slower, and finds more errors. Implies
    /// [`watch`](Self::watch). Default: no.
    pub fn preempt(mut self, preempt: bool) -> Self {
        self.preempt = preempt;
        self
    }

    /// Whether each access through cuda_std is checked against the memory that its GPU can access.
    /// Without it, an invalid access faults or is not detected, and livelocks are detected later.
    /// Default: yes.
    pub fn watch(mut self, watch: bool) -> Self {
        self.watch = watch;
        self
    }

    /// Stack size of a simulated thread in bytes; memory is committed on use. Default: 64 KiB.
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
    /// nccl_device. Default: ten minutes.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = Some(limit);
        self
    }

    /// Multiprocessors per GPU, each for up to 2048 threads and 32 blocks. Default: 132, as on an
    /// H200.
    pub fn multiprocessors(mut self, multiprocessors: u32) -> Self {
        self.multiprocessors = multiprocessors;
        self
    }

    /// Number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Size of an LSA team.
    #[must_use]
    pub fn team(&self) -> usize {
        self.team.unwrap_or(self.gpus)
    }

    /// Validates the settings.
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
        if self.multiprocessors == 0 {
            return refuse("a GPU without multiprocessors".to_owned());
        }
        Ok(Self { watch: self.watch || self.preempt, ..self.clone() })
    }
}

impl FromStr for Simulation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        const FORM: &str = "a number of GPUs and settings, such as `4,team=2,seed=7`";
        let refuse =
            |what: &str| Err(Error::Settings(format!("{what} in {text:?}; expected {FORM}")));
        let mut parts = text.split(',').map(str::trim);
        let Some(Ok(gpus)) = parts.next().map(str::parse) else {
            return refuse("no number of GPUs");
        };
        let mut simulation = Self::new(gpus);
        for part in parts {
            let Some((name, value)) = part.split_once('=') else {
                return refuse(&format!("{part:?} has no value"));
            };
            if name == "network" {
                simulation = simulation.network(match value {
                    "none" => GinConnectionType::None,
                    "rail" => GinConnectionType::Rail,
                    "full" => GinConnectionType::Full,
                    _ => {
                        return refuse(&format!(
                            "the network is {value:?}, not none, rail or full"
                        ));
                    }
                });
                continue;
            }
            let Ok(number) = value.parse::<u64>() else {
                return refuse(&format!("{name} is {value:?}, which is not a number"));
            };
            let clamped = u32::try_from(number).unwrap_or(u32::MAX);
            simulation = match name {
                "team" => simulation.team_size(clamped as usize),
                "multimem" => simulation.multimem(number != 0),
                "seed" => simulation.seed(number),
                "preempt" => simulation.preempt(number != 0),
                "watch" => simulation.watch(number != 0),
                "multiprocessors" => simulation.multiprocessors(clamped),
                _ => return refuse(&format!("unknown setting {name:?}")),
            };
        }
        simulation.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_from_text() {
        let read = |text: &str| text.parse::<Simulation>();
        assert_eq!(read("4").unwrap(), Simulation::new(4));
        let all = Simulation::new(8).team_size(2).multimem(false).seed(7).preempt(true);
        assert_eq!(
            read("8, team=2, multimem=0, seed=7, preempt=1").unwrap(),
            all.checked().unwrap()
        );
        let rails = Simulation::new(4).team_size(2).network(GinConnectionType::Rail);
        assert_eq!(read("4,team=2,network=rail").unwrap(), rails);
    }

    #[test]
    fn text_that_is_no_setting_is_refused_with_the_form() {
        for bad in
            ["", "x", "0", "4,team", "4,team=3", "4,speed=1", "4,seed=x", "4,network=1", "-1"]
        {
            let refusal = bad.parse::<Simulation>().unwrap_err().to_string();
            assert!(!refusal.is_empty(), "{bad}");
        }
        let refusal = "4,speed=1".parse::<Simulation>().unwrap_err().to_string();
        assert!(refusal.contains("speed") && refusal.contains("4,team=2"), "{refusal}");
    }
}
