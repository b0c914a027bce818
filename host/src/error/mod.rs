//! The crate's error type, with one variant per area: driver, NCCL, kernels, worlds and others.

mod abort;
mod dev_comm;
mod driver;
mod kernels;
mod launch;
mod nccl;
mod state;
mod stuck;
mod world;

pub use self::abort::AbortCause;
pub use self::dev_comm::DevCommError;
pub use self::driver::DriverError;
pub use self::kernels::LaunchError;
pub(crate) use self::kernels::order_of_calls;
pub use self::launch::LaunchRefusal;
pub(crate) use self::launch::registers_needed;
pub(crate) use self::nccl::renewal;
pub use self::nccl::{NcclError, NcclResult};
pub use self::state::StateError;
pub use self::stuck::StuckWait;
pub(crate) use self::stuck::waits;
pub use self::world::WorldError;
pub(crate) use self::world::ranks;

/// The error of every call of this crate. Its message says what failed, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CUDA driver or its GPUs.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// NCCL: its library, its version, its calls.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Kernels: loading, launching and aborting them.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Device communicators and windows.
    #[error(transparent)]
    DevComm(#[from] DevCommError),
    /// The world: its environment variables, its rendezvous, its ranks.
    #[error(transparent)]
    World(#[from] WorldError),
    /// An object is in a state that does not allow the call.
    #[error(transparent)]
    State(#[from] StateError),
    /// An argument is invalid.
    #[error("{what}")]
    InvalidInput {
        /// Which argument, and why.
        what: String,
    },
}

/// This crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns whether the program is correct, but the machine lacks what it needs: a driver, GPUs,
    /// or a feature of NCCL between them. The program may then skip the work or simulate it.
    #[must_use]
    pub fn is_hardware(&self) -> bool {
        match self {
            Self::Driver(error) => !matches!(error, DriverError::Failed { .. }),
            Self::Launch(error) => {
                matches!(error, LaunchError::WrongArch { .. } | LaunchError::PtxTooNew { .. })
            }
            Self::World(WorldError::CallFailed { is_hardware, .. }) => *is_hardware,
            Self::DevComm(DevCommError::Refused { is_hardware, .. }) => *is_hardware,
            Self::DevComm(_) => true,
            Self::Nccl(_) | Self::World(_) | Self::State(_) | Self::InvalidInput { .. } => false,
        }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::InvalidInput { what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_nccl_error_carries_operation_text_last_error_rank_and_hint() {
        let error = NcclError::Failed {
            operation: "ncclCommInitRank",
            code: 5,
            text: "invalid usage".into(),
            last_error: "Duplicate GPU detected\n".into(),
            rank: Some(3),
            hint: "run with NCCL_DEBUG=INFO",
        };
        assert_eq!(
            error.to_string(),
            "ncclCommInitRank failed on rank 3: invalid usage (code 5), NCCL says: Duplicate GPU \
             detected; run with NCCL_DEBUG=INFO"
        );
    }

    #[test]
    fn a_kernel_for_another_architecture_is_rebuilt_only_where_that_helps() {
        let message = |arch: &str| {
            let (file, arch) = ("gemm".to_owned(), arch.to_owned());
            LaunchError::WrongArch { file, arch, device: (8, 9) }.to_string()
        };
        assert!(message("sm_90").ends_with("rebuild with DEVCOMM_CUDA_ARCH=sm_89"));
        assert!(message("sm_90a").ends_with("sm_90a and no other: launch a kernel for this GPU"));
    }

    #[test]
    fn an_error_of_an_area_converts_to_one_of_the_crate_with_the_same_text() {
        let errors: [(Error, &str); 6] = [
            (
                DriverError::TooFewGpus { asked: 8, visible: 2 }.into(),
                "8 GPUs were asked for, but only 2 are visible on this machine; ask for fewer, or \
                 check CUDA_VISIBLE_DEVICES; ranks that are processes can share a GPU, with \
                 NCCL_MULTI_RANK_GPU_ENABLE=1",
            ),
            (
                NcclError::Unusable { path: "/lib/x.so".into(), reason: "it is empty".into() }
                    .into(),
                "/lib/x.so is not a usable NCCL library: it is empty",
            ),
            (
                LaunchError::Refused { kernel: "sum", refusal: LaunchRefusal::NoDevComm }.into(),
                "kernel `sum` was not launched: it takes a DevComm, but none is among the \
                 arguments",
            ),
            (
                DevCommError::NoWindow { rank: 1, bytes: 64 }.into(),
                "rank 1: NCCL registered no window over 64 bytes: symmetric memory is not \
                 supported between these ranks",
            ),
            (
                WorldError::RankLost { rank: 3, why: "its process has ended".into() }.into(),
                "rank 3 is lost: its process has ended",
            ),
            (
                StateError::DeadlinePassed { waited: Duration::from_millis(1500) }.into(),
                "the GPU has not finished after 1.5 s; its work may still run, and its memory is \
                 kept",
            ),
        ];
        for (error, text) in errors {
            assert_eq!(error.to_string(), text);
            assert!(std::error::Error::source(&error).is_none(), "the text must not be repeated");
        }
    }

    #[test]
    fn an_error_that_depends_on_the_hardware_is_a_hardware_error() {
        let is_hardware = |error: Error| error.is_hardware();
        let (rank, bytes) = (0, 1);
        assert!(is_hardware(DriverError::NoGpu.into()));
        assert!(is_hardware(DriverError::NotSimulated { what: String::new() }.into()));
        assert!(is_hardware(DevCommError::NoWindow { rank, bytes }.into()));
        for is_hardware_there in [false, true] {
            let why = String::new();
            let refused = DevCommError::Refused { rank, why, is_hardware: is_hardware_there };
            assert_eq!(is_hardware(refused.into()), is_hardware_there);
        }
        let (operation, code, name, text) = ("cuInit", 999, String::new(), String::new());
        assert!(!is_hardware(DriverError::Failed { operation, code, name, text }.into()));
        for is_hardware_there in [false, true] {
            let failed = WorldError::CallFailed {
                call: String::new(),
                rank,
                others: 0,
                why: String::new(),
                is_hardware: is_hardware_there,
            };
            assert_eq!(is_hardware(failed.into()), is_hardware_there);
        }
        assert!(!is_hardware(Error::invalid("no")));
    }

    #[test]
    fn an_error_stays_small_enough_to_return_by_value() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }
}
