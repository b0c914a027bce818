//! Names of symbols in kernels.

/// The array that `cuda_std` declares for dynamic shared memory.
pub(crate) const DYNAMIC_SHARED: &str = "__cuda_std_dynamic_shared";

/// Functions that the CUDA driver provides to every module.
pub(crate) const DRIVER_FUNCTIONS: [&str; 4] = ["vprintf", "__assertfail", "malloc", "free"];

pub(crate) fn demangled(name: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(name))
}
