//! The GIN types that host and device share. GIN is network communication by kernels.

/// Converts an enumeration from and to NCCL's numbers, and names its values.
macro_rules! numbered {
    ($type:ident: $($value:ident = $raw:literal, $name:literal;)*) => {
        impl $type {
            /// Converts NCCL's number; an unknown one becomes `Other`.
            #[must_use]
            pub const fn from_raw(raw: i32) -> Self {
                match raw {
                    $($raw => Self::$value,)*
                    other => Self::Other(other),
                }
            }

            /// Returns NCCL's number.
            #[must_use]
            pub const fn raw(self) -> i32 {
                match self {
                    $(Self::$value => $raw,)*
                    Self::Other(other) => other,
                }
            }
        }

        impl core::fmt::Display for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self {
                    $(Self::$value => f.write_str($name),)*
                    Self::Other(raw) => write!(f, "type {raw}"),
                }
            }
        }
    };
}

/// A back end of GIN: what moves the bytes that a kernel sends over the network.
///
/// NCCL: `ncclGinType_t`; also `ncclNetDeviceType` for the values that the device communicator
/// holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclGinType_t")]
#[non_exhaustive]
pub enum GinType {
    /// No GIN; in the requirements of a device communicator, any back end. NCCL:
    /// `NCCL_GIN_TYPE_NONE`, 0.
    #[doc(alias = "NCCL_GIN_TYPE_NONE")]
    None,
    /// A host thread posts the operations that the kernel queues. NCCL: `NCCL_GIN_TYPE_PROXY`, 2.
    #[doc(alias = "NCCL_GIN_TYPE_PROXY")]
    Proxy,
    /// The kernel rings the doorbells of an mlx5 network card itself. NCCL: `NCCL_GIN_TYPE_GDAKI`,
    /// 3.
    #[doc(alias = "NCCL_GIN_TYPE_GDAKI")]
    Gdaki,
    /// GPU-Push Interface of the Spectrum-X plugin. NCCL: `NCCL_GIN_TYPE_GPI`, 4.
    #[doc(alias = "NCCL_GIN_TYPE_GPI")]
    Gpi,
    /// GPUDirect Async for Amazon's EFA, of the AWS OFI plugin. NCCL: `NCCL_GIN_TYPE_EFA_GDA`, 5.
    #[doc(alias = "NCCL_GIN_TYPE_EFA_GDA")]
    EfaGda,
    /// A back end unknown to this crate, by NCCL's number.
    Other(i32),
}

impl GinType {
    /// The back ends that kernels are compiled for.
    pub const BACK_ENDS: [Self; 4] = [Self::Proxy, Self::Gdaki, Self::Gpi, Self::EfaGda];

    /// Returns what follows the kernel's name and an underscore in the name of its entry point for
    /// this back end; `None` for a back end that kernels are not compiled for.
    #[must_use]
    pub const fn suffix(self) -> Option<&'static str> {
        Some(match self {
            Self::Proxy => "proxy",
            Self::Gdaki => "gdaki",
            Self::Gpi => "gpi",
            Self::EfaGda => "efa_gda",
            Self::None | Self::Other(_) => return None,
        })
    }
}

numbered! {
    GinType:
    None = 0, "none";
    Proxy = 2, "PROXY";
    Gdaki = 3, "GDAKI";
    Gpi = 4, "GPI";
    EfaGda = 5, "EFA_GDA";
}

/// The ranks that a kernel can reach over the network.
///
/// NCCL: `ncclGinConnectionType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclGinConnectionType_t")]
#[non_exhaustive]
pub enum GinConnectionType {
    /// No connections: GIN is off. NCCL: `NCCL_GIN_CONNECTION_NONE`, 0.
    #[doc(alias = "NCCL_GIN_CONNECTION_NONE")]
    None,
    /// Every rank. NCCL: `NCCL_GIN_CONNECTION_FULL`, 1.
    #[doc(alias = "NCCL_GIN_CONNECTION_FULL")]
    Full,
    /// The ranks of the rail team. NCCL: `NCCL_GIN_CONNECTION_RAIL`, 2.
    #[doc(alias = "NCCL_GIN_CONNECTION_RAIL")]
    Rail,
    /// The ranks at multiples of a chosen stride. NCCL: `NCCL_GIN_CONNECTION_CUSTOM_STRIDE`,
    /// 3.
    #[doc(alias = "NCCL_GIN_CONNECTION_CUSTOM_STRIDE")]
    CustomStride,
    /// A type unknown to this crate, by NCCL's number.
    Other(i32),
}

numbered! {
    GinConnectionType:
    None = 0, "none";
    Full = 1, "FULL";
    Rail = 2, "RAIL";
    CustomStride = 3, "CUSTOM_STRIDE";
}

/// Signals that the host reserved for a kernel: `first..first + count`, the same on every rank and
/// in every context.
///
/// NCCL: `outGinSignalStart`, `ncclGinSignal_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclGinSignal_t")]
pub struct SignalRange {
    /// The first signal's id.
    pub first: u32,
    /// The number of signals.
    pub count: u32,
}

/// Counters that the host reserved for a kernel: `first..first + count`, the same on every rank and
/// in every context.
///
/// NCCL: `outGinCounterStart`, `ncclGinCounter_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[doc(alias = "ncclGinCounter_t")]
pub struct CounterRange {
    /// The first counter's id.
    pub first: u32,
    /// The number of counters.
    pub count: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_back_end_has_a_suffix_of_its_own() {
        let suffixes = GinType::BACK_ENDS.map(|back_end| back_end.suffix().unwrap());
        assert_eq!(suffixes, ["proxy", "gdaki", "gpi", "efa_gda"]);
        assert_eq!((GinType::None.suffix(), GinType::from_raw(6).suffix()), (None, None));
    }

    #[test]
    fn every_number_of_nccls_comes_back_as_itself() {
        for raw in [i32::MIN, -1, 0, 1, 2, 3, 4, 5, 6, 63, i32::MAX] {
            assert_eq!(GinType::from_raw(raw).raw(), raw);
            assert_eq!(GinConnectionType::from_raw(raw).raw(), raw);
        }
        // NCCL has no type 1.
        assert_eq!(GinType::from_raw(1), GinType::Other(1));
        assert_eq!(GinConnectionType::from_raw(4), GinConnectionType::Other(4));
    }
}
