//! What applications call: operations of devcomm's kernels, with all that can be wrong with a
//! launch checked before; and those kernels, compiled.

mod gemm_allreduce;

use devcomm_host::KernelSet;

pub use self::gemm_allreduce::{GemmAllReduce, GemmOptions};

/// What a program has in place of compiled kernels when its feature `ptx` is off: simulated GPUs
/// run kernels without PTX, so only a build for GPUs has to compile it.
pub const WITHOUT_PTX: KernelSet = KernelSet::new((
    &[],
    Some("the program was built without PTX: build it with `--features ptx` to run on GPUs"),
));

/// The kernels of `devcomm_kernels` for GPUs: what [`Rank::load`](devcomm_host::Rank::load) takes.
/// Compiled with the feature `ptx`.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet =
    KernelSet::new(include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs")));
/// The kernels of `devcomm_kernels` for GPUs: what [`Rank::load`](devcomm_host::Rank::load) takes.
/// Compiled with the feature `ptx`.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = WITHOUT_PTX;
