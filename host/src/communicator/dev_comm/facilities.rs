//! The facilities of a rank's machine, beyond the communicator's properties.

use devcomm_locate::gin_support;
use devcomm_types::GinType;

use crate::machine::Machine;
use crate::sys::cuda;

/// The facilities of a rank's machine.
#[derive(Clone, Debug)]
pub(crate) struct Facilities {
    /// The value of NCCL_NVLS_ENABLE.
    pub nvls_enable: Option<String>,
    /// Why a GIN back end (`None`: every one) is not available: what it needs, and what the machine
    /// has. Called only for an error message.
    pub why_no_gin: fn(Option<GinType>) -> String,
}

impl Facilities {
    /// Returns the facilities of the calling thread's machine.
    pub(crate) fn here() -> Self {
        Self::of(&Machine::current().unwrap_or(Machine::Gpus))
    }

    /// Returns the facilities of a machine. Environment variables do not apply to a simulated one.
    pub(crate) fn of(machine: &Machine) -> Self {
        if machine.is_simulated() {
            const WHY: &str =
                "a simulated network is PROXY; Simulation::network sets which ranks it connects";
            return Self { nvls_enable: None, why_no_gin: |_| WHY.to_owned() };
        }
        Self { nvls_enable: std::env::var("NCCL_NVLS_ENABLE").ok(), why_no_gin }
    }
}

fn why_no_gin(gin_type: Option<GinType>) -> String {
    gin_support(cuda::gin_gpus(&Machine::Gpus).ok()).why_not(gin_type.map(GinType::raw))
}
