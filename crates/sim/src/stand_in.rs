//! Stands in for the simulated machine until it is there.
#![allow(missing_docs, clippy::missing_errors_doc)]

use std::str::FromStr;
use std::time::Duration;

use devcomm_sys::driver::{CUDA, CUfunction, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;

use crate::Error;

#[derive(Clone, Debug)]
pub struct Simulation {
    gpus: usize,
}

impl Simulation {
    #[must_use]
    pub fn new(gpus: usize) -> Self {
        Self { gpus }
    }
    #[must_use]
    pub fn team_size(self, _gpus: usize) -> Self {
        self
    }
    #[must_use]
    pub fn seed(self, _seed: u64) -> Self {
        self
    }
}

impl FromStr for Simulation {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let gpus = text.split(',').next().and_then(|gpus| gpus.parse().ok());
        gpus.map(Self::new).ok_or_else(|| Error::Settings("stand-in".to_owned()))
    }
}

#[derive(Clone)]
pub struct Machine(usize);

impl Machine {
    pub fn new(simulation: &Simulation) -> Result<Self, Error> {
        Ok(Self(simulation.gpus))
    }
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.0
    }
    #[must_use]
    pub fn driver() -> &'static Driver {
        &CUDA
    }
    #[must_use]
    pub fn nccl() -> &'static Functions {
        static NONE: std::sync::LazyLock<Functions> = std::sync::LazyLock::new(Functions::default);
        &NONE
    }
    pub fn ticket(&self, _name: impl Into<String>) -> Ticket {
        Ticket
    }
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::ZERO
    }
    pub fn wait(&self, _deadline: Option<Duration>) -> Result<(), String> {
        Err("stand-in".to_owned())
    }
    pub fn notify(&self) {}
    #[must_use]
    pub fn bind(&self, _body: &HostBody) -> CUfunction {
        std::ptr::null_mut()
    }
    pub fn enter(&self) {}
}

pub struct Ticket;
impl Ticket {
    #[must_use]
    pub fn attach(self) -> Attached {
        Attached
    }
}
pub struct Attached;
