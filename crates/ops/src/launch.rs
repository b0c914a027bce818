//! The launch of a kernel by code that is generic over kernels: `K: LaunchWith<A>` says that `A`
//! are arguments of `K`, without a name for the type of its arguments.

use devcomm_host::{KernelsOn, LaunchConfig, Result};
use devcomm_types::{Kernel, KernelParam, LaunchArgs, LaunchTarget};

/// The type to which the host's values for a kernel's parameter convert.
pub(crate) type Abi<P> = <P as KernelParam>::Abi;

/// A kernel that can be launched with arguments `A`.
pub trait LaunchWith<A>: Kernel {
    /// Launches the kernel.
    ///
    /// # Safety
    ///
    /// That of [`Launch::launch`](devcomm_types::Launch::launch).
    unsafe fn launch(args: A, config: LaunchConfig, target: &KernelsOn<'_>) -> Result<()>;
}

impl<K: Kernel, A: LaunchArgs<K::Args>> LaunchWith<A> for K {
    unsafe fn launch(args: A, config: LaunchConfig, target: &KernelsOn<'_>) -> Result<()> {
        // For a safe kernel windows would be checked, for which this caller vouches.
        let is_safe = false;
        // SAFETY: the caller passes arguments that the kernel may use until it has ended.
        unsafe { target.launch_kernel::<K, A>(config, args, is_safe) }
    }
}
