//! Errors of the CUDA driver and its GPUs, and of what the simulator does not support.

/// Why the CUDA driver or its GPUs cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no CUDA driver.
    #[error(
        "no CUDA driver: {reason}; install NVIDIA's driver, run where there is one, or simulate \
         GPUs with DEVCOMM_SIMULATE=4"
    )]
    NoDriver {
        /// The libraries that were tried, and why each did not load.
        reason: String,
    },
    /// The driver lacks functions that this crate calls.
    #[error(
        "the CUDA driver is too old: it supports CUDA {has}, needed is {needs}; update NVIDIA's \
         driver"
    )]
    TooOld {
        /// The CUDA version that is needed.
        needs: String,
        /// The CUDA version that the driver supports.
        has: String,
    },
    /// The driver sees no GPU.
    #[error(
        "no GPU: the CUDA driver sees none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or \
         simulate GPUs with DEVCOMM_SIMULATE=4"
    )]
    NoGpu,
    /// More ranks than GPUs.
    #[error(
        "{asked} GPUs were asked for, but only {visible} are visible on this machine; ask for \
         fewer, or check CUDA_VISIBLE_DEVICES; ranks that are processes can share a GPU, with \
         NCCL_MULTI_RANK_GPU_ENABLE=1"
    )]
    TooFewGpus {
        /// GPUs asked for.
        asked: usize,
        /// GPUs that the driver shows.
        visible: usize,
    },
    /// A call into the CUDA driver failed.
    #[error("{operation} failed: {text} ({name}, code {code})")]
    Failed {
        /// The driver function.
        operation: &'static str,
        /// The driver's error code.
        code: u32,
        /// The error's name.
        name: String,
        /// The driver's text about it.
        text: String,
    },
    /// A simulated machine does not support this: it runs only kernels whose body is in Rust, and
    /// takes no streams or contexts of other libraries.
    #[error("{what} cannot be simulated; run it on GPUs, without DEVCOMM_SIMULATE")]
    NotSimulated {
        /// The feature that was requested.
        what: String,
    },
}
