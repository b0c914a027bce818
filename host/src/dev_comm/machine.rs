//! What a rank's machine says about requirements, beyond the communicator's properties.

use devcomm_locate::gin_machine;
use devcomm_types::GinType;

use crate::sys::cuda;

/// What a rank's machine says.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// The value of NCCL_NVLS_ENABLE.
    pub nvls_enable: Option<String>,
    /// Why a back end of GIN, or any if none is named, is not there: what it needs, and what is here. Asked only to refuse.
    pub why_no_gin: fn(Option<GinType>) -> String,
}

impl Machine {
    /// The one that this process runs on.
    pub(crate) fn this() -> Self {
        Self { nvls_enable: std::env::var("NCCL_NVLS_ENABLE").ok(), why_no_gin }
    }
}

fn why_no_gin(gin_type: Option<GinType>) -> String {
    gin_machine(cuda::gin_gpus().ok()).why_not(gin_type.map(GinType::raw))
}
