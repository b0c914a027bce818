//! The back ends of GIN, as types.

use devcomm_types::GinType;

mod sealed {
    pub trait Sealed {}
}

/// A back end of GIN, as a type: a kernel is compiled once per back end, and the launch selects the
/// device communicator's.
///
/// `#[kernel(B = gin)]` generates the entry points; a launch names the kernel without `B`.
pub trait GinBackend: sealed::Sealed + Copy + 'static {
    /// NCCL's type.
    const TYPE: GinType;
    /// The back end as a bit mask. NCCL: `backendMask`.
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
    /// The kernel queues operations, and a host thread posts them.
    Proxy
    /// GPUDirect Async: the kernel rings the doorbells of an mlx5 network card.
    Gdaki
    /// GPU-Push Interface, of the Spectrum-X plugin.
    Gpi
    /// GPUDirect Async of Amazon's EFA.
    EfaGda
}
