//! The simulated machine: the simulator's functions, clock and waits as this crate calls them.

use std::path::Path;
use std::time::Duration;

use devcomm_sim::{EventCount, Simulation};
use devcomm_sys::driver::{CUfunction, CUmodule, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;
use parking_lot::Mutex;

use super::{VARIABLE, Wakes};
use crate::error::{Error, Result, StateError, WorldError};

/// A simulated machine. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Simulated(devcomm_sim::Machine);

/// The path that is reported for the simulator's NCCL.
pub(crate) const NCCL_PATH: &str = "<simulated>";

/// Returns the machine that the environment selects, made at the first call.
pub(super) fn from_env(team: Option<usize>) -> Result<Option<Simulated>> {
    static MACHINE: Mutex<Option<(Simulated, usize)>> = Mutex::new(None);
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let refused = |why| {
        let value = Some(value.to_string_lossy().into_owned());
        Error::World(WorldError::Environment { variable: VARIABLE, value, why })
    };
    let mut machine = MACHINE.lock();
    if machine.is_none() {
        let made = value.to_string_lossy().parse().and_then(|simulation: Simulation| {
            let made = make(&simulation, team)?;
            Ok((made, team.unwrap_or(simulation.team())))
        });
        *machine = Some(made.map_err(|error| refused(error.to_string()))?);
    }
    match &*machine {
        Some((_, made)) if team.is_some_and(|team| team != *made) => Err(refused(format!(
            "this process has made its machine already, with LSA teams of {made}, before a world \
             with GinLoopback::lsa_team_size({})",
            team.unwrap_or_default()
        ))),
        made => Ok(made.as_ref().map(|(machine, _)| machine.clone())),
    }
}

fn make(simulation: &Simulation, team: Option<usize>) -> Result<Simulated, devcomm_sim::Error> {
    let settings = simulation.clone();
    let settings = if let Some(team) = team { settings.team_size(team) } else { settings };
    devcomm_sim::Machine::new(&settings).map(Simulated)
}

impl Simulated {
    pub(super) fn new(simulation: &Simulation, team: Option<usize>) -> Result<Self> {
        make(simulation, team).map_err(|error| Error::invalid(error.to_string()))
    }

    pub(super) fn machine(&self) -> &devcomm_sim::Machine {
        &self.0
    }

    pub(super) fn nccl(&self) -> (&'static Path, Functions) {
        (Path::new(NCCL_PATH), *devcomm_sim::Machine::nccl())
    }

    pub(super) fn load_module(&self) -> CUmodule {
        self.enter();
        self.0.load_module()
    }

    /// Returns the function of a module that runs `body` on the GPU of the current context.
    pub(super) fn bind(&self, module: CUmodule, body: &HostBody) -> CUfunction {
        self.enter();
        self.0.bind(module, body)
    }

    pub(super) fn driver(&self) -> &'static Driver {
        self.enter();
        devcomm_sim::Machine::driver()
    }

    pub(super) fn enter(&self) {
        self.0.enter();
    }

    pub(super) fn ticket(&self, name: &str) -> devcomm_sim::Ticket {
        self.0.ticket(name.to_owned())
    }

    pub(super) fn now(&self) -> Duration {
        self.0.now()
    }

    pub(super) fn notify(&self) {
        self.0.notify();
    }

    pub(super) fn exchange(&self) {
        self.0.exchange();
    }

    pub(super) fn event_count(&self) -> EventCount {
        self.0.event_count()
    }

    pub(super) fn wait(
        &self,
        wakes: Wakes,
        since: EventCount,
        end: Option<Duration>,
    ) -> Result<()> {
        self.enter();
        let waited = match wakes {
            Wakes::Anything => self.0.wait(since, end),
            Wakes::Notified => self.0.wait_for_notify(since, end),
            Wakes::Idle(stream) => self.0.wait_for_stream(stream, since, end),
        };
        waited.map_err(|report| Error::State(StateError::Deadlock { report }))
    }
}
