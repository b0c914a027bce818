//! NCCL's host functions on a simulated machine.

use devcomm_sys::nccl::Functions;

use crate::simulation::Simulation;

/// What NCCL keeps for each host thread.
#[derive(Default)]
pub(crate) struct ThreadState {}

/// What NCCL keeps for the machine.
pub(crate) struct State {}

impl State {
    pub(crate) fn new(_simulation: &Simulation) -> Self {
        Self {}
    }
}

/// The table.
pub(crate) static NCCL: Functions = Functions::NONE;
