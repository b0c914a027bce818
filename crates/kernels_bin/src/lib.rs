//! devcomm's kernels, compiled for GPUs: with the feature `kernels-bin` of `devcomm` a program
//! contains these, and its build needs no compiler for kernels, no NCCL and no `ptxas`.
//!
//! In a checkout `cargo xtask kernels-bin` compiles them into the folder `data` of this package.

/// The modules, each with its name, PTX (zlib), description (JSON) and cubin (zlib). The second
/// item is `None`: the type is that of every index of `cuda_builder`, where the item is the reason
/// for which a build made no modules.
pub type Index = (
    &'static [(&'static str, &'static [u8], &'static str, Option<&'static [u8]>)],
    Option<&'static str>,
);

/// Returns the kernels, for the initialiser of a constant or static.
///
/// # Panics
///
/// If `data` has no kernels of this version and of these sources; the message says what to do. In
/// an initialiser that is an error of the compiler.
#[must_use]
pub const fn kernels() -> Index {
    #[cfg(devcomm_has_kernels)]
    return include!("../data/kernels.rs");
    #[cfg(not(devcomm_has_kernels))]
    panic!("{}", env!("DEVCOMM_KERNELS_PROBLEM"))
}
