//! Launches of kernels by arguments as a tuple, and code for kernels of several types.

use devcomm_host::{KernelsOn, LaunchConfig, Result};
use devcomm_types::{Kernel, KernelParam, LaunchArgs, LaunchTarget};

/// The type to which the host's values for a kernel's parameter convert.
pub(crate) type Abi<P> = <P as KernelParam>::Abi;

/// The launch of a kernel by arguments as a tuple.
pub(crate) trait LaunchWith: Kernel + Sized {
    /// Launches the kernel.
    ///
    /// # Safety
    ///
    /// That of [`Launch::launch`](devcomm_types::Launch::launch).
    unsafe fn launch<A: LaunchArgs<Self::Args>>(
        args: A,
        config: LaunchConfig,
        target: &KernelsOn<'_>,
    ) -> Result<()> {
        // A launch of a safe kernel would check windows, for which this function's caller vouches.
        let is_safe = false;
        // SAFETY: the caller passes arguments that the kernel may use until it has ended.
        unsafe { target.launch_kernel::<Self, A>(config, args, is_safe) }
    }
}

impl<K: Kernel> LaunchWith for K {}

/// Evaluates an expression in which `$name` is the type beside the pattern that a value matches.
macro_rules! with_type {
    ($value:expr, $name:ident => $then:expr; { $($pattern:pat => $type:ty),+ }) => {
        match $value {
            $($pattern => {
                type $name = $type;
                $then
            })+
        }
    };
}

pub(crate) use with_type;

/// Evaluates an expression in which `$name` is the type of elements, one of these, of `$data_type`.
macro_rules! with_element {
    ($data_type:expr, $name:ident in $last:ty => $then:expr) => {{
        type $name = $last;
        $then
    }};
    ($data_type:expr, $name:ident in $first:ty, $($rest:ty),+ => $then:expr) => {
        if $data_type == <$first as Element>::DATA_TYPE {
            type $name = $first;
            $then
        } else {
            with_element!($data_type, $name in $($rest),+ => $then)
        }
    };
}

pub(crate) use with_element;
