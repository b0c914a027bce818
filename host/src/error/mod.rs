//! The one error of this crate, and what it tells of kernels and launches.

mod abort;
mod launch;
mod stuck;
mod text;

use std::path::PathBuf;
use std::time::Duration;

use devcomm_locate::{NcclVersion, NotFound};

pub use self::abort::AbortCause;
pub use self::launch::LaunchRefusal;
pub(crate) use self::launch::registers_needed;
pub use self::stuck::StuckWait;
use self::stuck::report;
pub(crate) use self::stuck::waits;
pub(crate) use self::text::ranks;
use self::text::{and_others, arch_advice, details, log_text, on_rank, quoted, shown};

/// Everything that can go wrong on the host. A message says what failed, where, and what to do
/// about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no CUDA driver to talk to.
    #[error(
        "no CUDA driver: {reason}; install NVIDIA's driver, run where there is one, or simulate GPUs with DEVCOMM_SIMULATE=4"
    )]
    NoDriver {
        /// What was tried.
        reason: String,
    },
    /// The driver lacks functions that this crate calls.
    #[error(
        "the CUDA driver is too old: it supports CUDA {has}, needed is {needs}; update NVIDIA's driver"
    )]
    DriverTooOld {
        /// The CUDA version that is needed.
        needs: String,
        /// The CUDA version that the driver supports.
        has: String,
    },
    /// The driver sees no GPU.
    #[error(
        "no GPU: the CUDA driver sees none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or simulate GPUs with DEVCOMM_SIMULATE=4"
    )]
    NoGpu,
    /// More ranks than GPUs.
    #[error(
        "{asked} GPUs were asked for, but only {visible} are visible on this machine; ask for fewer, or check CUDA_VISIBLE_DEVICES"
    )]
    TooFewGpus {
        /// GPUs asked for.
        asked: usize,
        /// GPUs that the driver shows.
        visible: usize,
    },
    /// A call into the CUDA driver failed.
    #[error("{operation} failed: {text} ({name}, code {code})")]
    Cuda {
        /// The driver function.
        operation: &'static str,
        /// The driver's error code.
        code: u32,
        /// The error's name.
        name: String,
        /// What the driver says about it.
        text: String,
    },
    /// No NCCL library that will do was found.
    #[error(transparent)]
    NcclNotFound(#[from] NotFound),
    /// A file is not a usable NCCL library.
    #[error("{} is not a usable NCCL library: {reason}", path.display())]
    NcclUnusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The loaded NCCL is older than what is asked of it.
    #[error(
        "NCCL {has} ({}) is too old: {needs} or newer is needed; run `cargo xtask setup`, or name a newer one in DEVCOMM_NCCL_HOME",
        path.display()
    )]
    NcclTooOld {
        /// The version needed.
        needs: NcclVersion,
        /// The version found.
        has: NcclVersion,
        /// The library.
        path: PathBuf,
    },
    /// The loaded NCCL cannot do something.
    #[error("{what} needs NCCL {needs} or newer; the loaded one is {has}")]
    Unsupported {
        /// A function or feature.
        what: &'static str,
        /// The first version that has it.
        needs: NcclVersion,
        /// The loaded version.
        has: NcclVersion,
    },
    /// A call into NCCL failed.
    #[error("{operation} failed{}: {text} (code {code}){}; {hint}", on_rank(*rank), quoted(last_error))]
    Nccl {
        /// The NCCL function.
        operation: &'static str,
        /// NCCL's `ncclResult_t`.
        code: i32,
        /// `ncclGetErrorString`.
        text: String,
        /// `ncclGetLastError`, or empty.
        last_error: String,
        /// The rank it failed on, once there is one.
        rank: Option<usize>,
        /// What to do next.
        hint: &'static str,
    },
    /// A device communicator was not asked for, because it could not be made.
    #[error("no device communicator: rank {rank}{} refuses: {why}", and_others(*others))]
    DevCommRefused {
        /// The first rank that refuses.
        rank: usize,
        /// How many other ranks refuse too.
        others: usize,
        /// That rank's [`RequirementsRefusal`](crate::RequirementsRefusal).
        why: String,
    },
    /// Ranks asked for different device communicators.
    #[error(
        "no device communicator: {field} is {} on rank {} but {} on rank {}; every rank asks for the same",
        first.1, first.0, second.1, second.0
    )]
    RequirementsDiffer {
        /// What differs.
        field: String,
        /// A rank and what it asked for.
        first: (usize, String),
        /// Another rank and what it asked for.
        second: (usize, String),
    },
    /// NCCL took the memory but gave no window.
    #[error(
        "rank {rank}: NCCL registered no window over {bytes} bytes: symmetric memory is not supported between these ranks"
    )]
    NoWindow {
        /// The rank that asked.
        rank: usize,
        /// Size in bytes.
        bytes: usize,
    },
    /// The ranks are in more than one load/store domain.
    #[error("not every rank reaches every other by load and store; the domains are: {}", teams.join("; "))]
    SeveralLsaTeams {
        /// Each domain: its ranks and their hosts.
        teams: Vec<String>,
    },
    /// A value handed to this crate makes no sense.
    #[error("{what}")]
    InvalidInput {
        /// Which value, and why.
        what: String,
    },

    /// The communicator is no longer of use for this.
    #[error("rank {rank}: the communicator is {how}, which does not allow this")]
    CommunicatorEnded {
        /// The rank.
        rank: usize,
        /// Its state: suspended, revoked, finalized, destroyed or aborted.
        how: &'static str,
    },
    /// What belongs to a communicator was used after it was closed.
    #[error("rank {rank}: {what} is closed")]
    Closed {
        /// What it was.
        what: &'static str,
        /// The rank.
        rank: usize,
    },
    /// A non-blocking communicator has not done yet what was asked of it last.
    #[error(
        "{operation} on rank {rank}: the communicator is still busy with the operation before; wait until it is ready"
    )]
    InProgress {
        /// What was asked of it.
        operation: &'static str,
        /// The rank.
        rank: usize,
    },
    /// This cannot be deferred to the end of a group.
    #[error("{what} is not possible inside a group")]
    InGroup {
        /// What was asked for.
        what: &'static str,
    },
    /// This cannot be part of a graph.
    #[error("{what} while a stream is captured to a graph; do it before the capture")]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },

    /// There are no compiled kernels in this program.
    #[error("this program holds no GPU kernels: {reason}")]
    KernelsUnavailable {
        /// Why they were not built, and what to do.
        reason: String,
    },
    /// A kernel's description cannot be read.
    #[error("the description of kernel module {file} is broken: {why}; rebuild the kernels")]
    BadSidecar {
        /// The module.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// No kernel of this name was loaded.
    #[error("there is no kernel `{name}`; there are: {}", available.join(", "))]
    KernelNotFound {
        /// The name asked for.
        name: String,
        /// The kernels that were loaded.
        available: Vec<String>,
    },
    /// The driver refused a module.
    #[error("the driver cannot load kernel module {file} ({name}){}", log_text(log))]
    ModuleRejected {
        /// The module.
        file: String,
        /// The driver's error.
        name: String,
        /// The log of the driver's compiler.
        log: String,
    },
    /// The module's PTX is newer than the driver's compiler.
    #[error(
        "kernel module {file} is PTX {ptx}, which is newer than the driver (CUDA {driver}) can compile; update the driver, or rebuild the kernels for an older PTX ISA"
    )]
    PtxTooNew {
        /// The module.
        file: String,
        /// The PTX ISA of the module.
        ptx: String,
        /// The CUDA version of the driver.
        driver: String,
    },
    /// The module was built for another architecture.
    #[error(
        "kernel module {file} was built for {arch}, which does not run on this GPU (compute capability {}.{}); {}",
        device.0, device.1, arch_advice(arch, *device)
    )]
    WrongArch {
        /// The module.
        file: String,
        /// Its architecture.
        arch: String,
        /// The GPU's compute capability.
        device: (u32, u32),
    },
    /// The module reads a device communicator of another layout.
    #[error(
        "kernel module {file} was linked with the device code of NCCL {module}, but this program makes device communicators of NCCL {layout}; rebuild the kernels with NCCL {layout}"
    )]
    WrongNcclStamp {
        /// The module.
        file: String,
        /// The version of the bitcode in the module.
        module: NcclVersion,
        /// The version of the communicators' layout.
        layout: NcclVersion,
    },
    /// A launch that would fail, hang or corrupt memory was not made.
    #[error("kernel `{kernel}` was not launched: {refusal}")]
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// Why.
        refusal: LaunchRefusal,
    },
    /// Kernels that waited for another rank were ended, and what they computed is of no use.
    #[error("rank {rank}: its kernels were ended: {cause}{}", report(stuck))]
    KernelAborted {
        /// The rank.
        rank: usize,
        /// Why they were ended.
        cause: AbortCause,
        /// What their blocks waited for.
        stuck: Vec<StuckWait>,
    },
    /// The GPU did not finish in time.
    #[error(
        "the GPU had not finished after {:.1} s; its work is still running and its memory is kept",
        waited.as_secs_f64()
    )]
    DeadlinePassed {
        /// The time waited.
        waited: Duration,
    },

    /// On a simulated machine: everybody waits, and nothing that they wait for can happen. On GPUs
    /// this would hang.
    #[error("deadlock: {report}")]
    Deadlock {
        /// Who waits for what.
        report: String,
    },
    /// A simulated machine has no such thing: it runs kernels that have a body in Rust, and knows
    /// its own objects only.
    #[error("{what} cannot be simulated; run it on GPUs, without DEVCOMM_SIMULATE")]
    NotSimulated {
        /// What was asked for.
        what: String,
    },

    /// An environment variable of the launcher is missing or makes no sense.
    #[error("{variable}{}: {why}", shown(value))]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value, if set.
        value: Option<String>,
        /// What is wrong, and what to do.
        why: String,
    },
    /// Settings came too late: other threads run already, and one of them may be reading the
    /// environment.
    #[error(
        "{} must be set before this process starts threads, but it has {threads}; build the world first thing in main, or set the variables outside",
        variables.join(" ")
    )]
    EnvironmentInUse {
        /// Each as `NAME=value`.
        variables: Vec<String>,
        /// Threads of this process.
        threads: usize,
    },
    /// devcomm's RMA plugin, of which [`GinLoopback`](crate::GinLoopback) is the switch, was not
    /// found.
    #[error("{not_found}")]
    GinLoopbackNotFound {
        /// Where it was sought.
        not_found: NotFound,
    },
    /// Some ranks did not come to the rendezvous.
    #[error(
        "{} did not arrive at {address} within {:.0} s{}; check that every process was started (DEVCOMM_TIMEOUT sets the time)",
        ranks(missing), waited.as_secs_f64(), details(notes)
    )]
    RanksMissing {
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// Where the ranks meet.
        address: String,
        /// The time waited.
        waited: Duration,
        /// What else happened there: refused connections, the last error.
        notes: Vec<String>,
    },
    /// The rendezvous failed otherwise.
    #[error("rendezvous at {address}: {why}")]
    Rendezvous {
        /// Where the ranks meet.
        address: String,
        /// What happened.
        why: String,
    },
    /// Two ranks loaded different NCCL libraries.
    #[error(
        "rank {} loaded NCCL {} but rank {} loaded NCCL {}; point DEVCOMM_NCCL_HOME at one version everywhere",
        first.0, first.1, second.0, second.1
    )]
    NcclVersionsDiffer {
        /// A rank and its version.
        first: (usize, NcclVersion),
        /// Another rank and its version.
        second: (usize, NcclVersion),
    },
    /// Another rank is gone; the job cannot go on.
    #[error("rank {rank} is lost: {why}")]
    RankLost {
        /// The rank.
        rank: usize,
        /// What is known of it.
        why: String,
    },
    /// The function of a rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A process started by [`World::spawn_local`](crate::World::spawn_local) failed.
    #[error("rank {rank} failed: its process ended with {how}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Exit code or signal.
        how: String,
    },
    /// A process could not be started.
    #[error("rank {rank} could not be started: {why}")]
    SpawnFailed {
        /// The rank.
        rank: usize,
        /// The system's reason.
        why: String,
    },
    /// The job was ended by a signal.
    #[error("the job was ended by {signal}")]
    Interrupted {
        /// The signal's name.
        signal: &'static str,
    },
}

/// This crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Whether the machine is what does not do: its driver, its GPUs, or what NCCL offers between
    /// them. The program is right then, and may skip what it cannot do here, or simulate it.
    #[must_use]
    pub fn is_of_the_machine(&self) -> bool {
        matches!(
            self,
            Self::NoDriver { .. }
                | Self::DriverTooOld { .. }
                | Self::NoGpu
                | Self::TooFewGpus { .. }
                | Self::WrongArch { .. }
                | Self::PtxTooNew { .. }
                | Self::DevCommRefused { .. }
                | Self::NoWindow { .. }
                | Self::SeveralLsaTeams { .. }
                | Self::NotSimulated { .. }
        )
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        Self::InvalidInput { what: what.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nccl_error_carries_operation_text_last_error_rank_and_hint() {
        let error = Error::Nccl {
            operation: "ncclCommInitRank",
            code: 5,
            text: "invalid usage".into(),
            last_error: "Duplicate GPU detected\n".into(),
            rank: Some(3),
            hint: "run with NCCL_DEBUG=INFO",
        };
        assert_eq!(
            error.to_string(),
            "ncclCommInitRank failed on rank 3: invalid usage (code 5), NCCL says: Duplicate GPU detected; run with NCCL_DEBUG=INFO"
        );
    }

    #[test]
    fn a_kernel_for_another_architecture_is_rebuilt_only_where_that_helps() {
        let message = |arch: &str| {
            let (file, arch) = ("gemm".to_owned(), arch.to_owned());
            Error::WrongArch { file, arch, device: (8, 9) }.to_string()
        };
        assert!(message("sm_90").ends_with("rebuild with DEVCOMM_CUDA_ARCH=sm_89"));
        assert!(message("sm_90a").ends_with("sm_90a and no other: launch a kernel for this GPU"));
    }

    #[test]
    fn an_error_stays_small_enough_to_return_by_value() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }
}
