//! Errors of loading, launching and aborting kernels.

use devcomm_locate::NcclVersion;

use super::stuck::report;
use super::{AbortCause, LaunchRefusal, StuckWait};

/// Why kernels were not loaded, not launched, or aborted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The program contains no compiled kernels.
    #[error("this program contains no GPU kernels: {reason}")]
    KernelsUnavailable {
        /// Why they were not built, and what to do.
        reason: String,
    },
    /// The description of a kernel module (its JSON sidecar) cannot be read.
    #[error("the description of kernel module {file} is invalid: {why}; rebuild the kernels")]
    BadSidecar {
        /// The module.
        file: String,
        /// Why the module cannot be used.
        why: String,
    },
    /// No kernel of this name was loaded.
    #[error("there is no kernel `{name}`; {}", loaded(available))]
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
    /// The module's PTX ISA is newer than the driver's compiler supports.
    #[error(
        "kernel module {file} is PTX {ptx}, which is newer than the driver (CUDA {driver}) can \
         compile; update the driver, or rebuild the kernels for an older PTX ISA"
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
        "kernel module {file} was built for {arch}, which does not run on this GPU (compute \
         capability {}.{}); {}",
        device.0, device.1, arch_advice(arch, *device)
    )]
    WrongArch {
        /// The module.
        file: String,
        /// The architecture.
        arch: String,
        /// The GPU's compute capability.
        device: (u32, u32),
    },
    /// The module reads device communicators of a different layout.
    #[error(
        "kernel module {file} was linked with the device code of NCCL {module}, but this program \
         makes device communicators of NCCL {layout}; rebuild the kernels with NCCL {layout}"
    )]
    WrongNcclStamp {
        /// The module.
        file: String,
        /// The NCCL version of the bitcode in the module.
        module: NcclVersion,
        /// The NCCL version of the device communicators' layout.
        layout: NcclVersion,
    },
    /// A launch that would fail, hang or corrupt memory was not made.
    #[error("kernel `{kernel}` was not launched: {refusal}")]
    Refused {
        /// The kernel.
        kernel: &'static str,
        /// Why.
        refusal: LaunchRefusal,
    },
    /// Kernels that waited for another rank were aborted, and their results are invalid.
    #[error(
        "rank {rank}: its kernels were aborted: {cause}{}{}",
        report(stuck),
        order_of_calls(objects)
    )]
    KernelAborted {
        /// The rank whose kernels they are.
        rank: usize,
        /// Why they were aborted.
        cause: AbortCause,
        /// The waits of their blocks.
        stuck: Vec<StuckWait>,
        /// Objects with operations that had not ended when a deadline passed, such as
        /// `Collectives 2`, in the order in which this rank has called these. Without
        /// [room](crate::StreamOrder) for all, each one waits for those before it.
        objects: Vec<String>,
    },
}

/// Returns a line with the order in which a rank has called operations of these objects, if there
/// are several.
pub(crate) fn order_of_calls(objects: &[String]) -> String {
    if objects.len() < 2 {
        return String::new();
    }
    format!(
        "\n  this rank has operations in progress, in the order of its calls: {}; where a GPU has \
         no room for all of them, all ranks must call them in the same order",
        objects.join(", ")
    )
}

/// Returns what to do. A module with an architecture-specific target (`sm_90a`) cannot be rebuilt
/// for another GPU.
fn arch_advice(arch: &str, (major, minor): (u32, u32)) -> String {
    if arch.ends_with(|last: char| last.is_ascii_alphabetic()) {
        return format!("its source asks for {arch} and no other: launch a kernel for this GPU");
    }
    format!("rebuild with DEVCOMM_CUDA_ARCH=sm_{major}{minor}")
}

fn log_text(log: &str) -> String {
    let log = log.trim();
    if log.is_empty() { String::new() } else { format!("; its log:\n{log}") }
}

/// Returns the list of loaded kernels.
fn loaded(names: &[String]) -> String {
    match names {
        [] => "none is loaded: `Rank::load` loads a program's kernels".to_owned(),
        names => format!("there are: {}", names.join(", ")),
    }
}
