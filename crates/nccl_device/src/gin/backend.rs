//! The back ends of GIN: who moves the bytes.

use devcomm_types::GinType;

mod sealed {
    pub trait Sealed {}
}

/// A back end of GIN, as a type: a kernel is compiled once for each, and the launch picks by the
/// device communicator.
///
/// `#[kernel(B = gin)]` makes the entries; a launch names the kernel without the parameter.
pub trait GinBackend: sealed::Sealed + Copy + 'static {
    /// NCCL's type.
    const TYPE: GinType;
    /// NCCL's mask with this back end alone. NCCL: `backendMask`.
    const MASK: u32 = 1 << Self::TYPE.raw();
}

macro_rules! backends {
    ($($(#[$doc:meta])* $name:ident)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {}

        impl sealed::Sealed for $name {}

        impl GinBackend for $name {
            const TYPE: GinType = GinType::$name;
        }
    )* };
}

backends! {
    /// A thread of the host posts what the kernel queues.
    Proxy
    /// The kernel rings the doorbells of an mlx5 network card itself.
    Gdaki
    /// GPU-Push Interface, of Spectrum-X's plugin.
    Gpi
    /// GPUDirect Async of Amazon's EFA.
    EfaGda
}
