//! Configurations of communicators and collectives: NCCL's settings, by name.
//!
//! Every setting is unset at first, which leaves it to NCCL. NCCL's environment variables take
//! precedence over settings. Values are checked when they are used: an invalid one fails with
//! [`Error::InvalidInput`], one that the loaded library is too old for with
//! [`NcclError::Unsupported`]; neither reaches NCCL.
//!
//! ```
//! use devcomm_host::{CommConfig, CtaPolicy};
//! let config = CommConfig::new()
//!     .blocking(false)
//!     .max_ctas(8)
//!     .cta_policy(CtaPolicy::ZERO)
//!     .comm_name("tensor parallel");
//! assert!(!config.is_blocking());
//! ```

mod collective;

use std::ffi::{CString, c_int};
use std::path::Path;

use devcomm_locate::NcclVersion;

use crate::error::{Error, NcclError, Result};
use devcomm_sys::nccl::Config;

pub use self::collective::{CollectiveConfig, VendorValue};
pub(crate) use crate::sys::nccl::lists_config::{LoweredCollectiveConfig, LoweredConfig};

bitflags::bitflags! {
    /// How NCCL uses a GPU's multiprocessors. NCCL: `NCCL_CTA_POLICY_*`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[doc(alias = "NCCL_CTA_POLICY_DEFAULT")]
    pub struct CtaPolicy: i32 {
        /// The fewest thread blocks that saturate the link. NCCL: `NCCL_CTA_POLICY_EFFICIENCY`.
        #[doc(alias = "NCCL_CTA_POLICY_EFFICIENCY")]
        const EFFICIENCY = 1;
        /// No thread blocks where copy engines can do the work; takes precedence over `EFFICIENCY`.
        /// NCCL: `NCCL_CTA_POLICY_ZERO`.
        #[doc(alias = "NCCL_CTA_POLICY_ZERO")]
        const ZERO = 2;
    }

    /// Which uses of NVLink SHARP (multicast) are disabled for the host's collectives; empty
    /// disables none. NCCL: `ncclNvlsHostMode_t`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[doc(alias = "ncclNvlsHostMode_t")]
    pub struct NvlsHostMode: i32 {
        /// The NVLS transport and its use of registered buffers. NCCL:
        /// `ncclNvlsHostModeDisableTransport`.
        const DISABLE_TRANSPORT = 1;
        /// Multicast in NCCL's symmetric kernels and copy engines. NCCL:
        /// `ncclNvlsHostModeDisableSymmetricMultimem`.
        const DISABLE_SYMMETRIC_MULTIMEM = 2;
        /// All uses, also those of later versions. NCCL: `ncclNvlsHostModeDisable`.
        const DISABLE = i32::MAX;
    }
}

impl CtaPolicy {
    /// Optimizes for speed. NCCL: `NCCL_CTA_POLICY_DEFAULT`.
    pub const DEFAULT: Self = Self::empty();
}

impl NvlsHostMode {
    /// Disables nothing. NCCL: `ncclNvlsHostModeEnable`.
    pub const ENABLE: Self = Self::empty();
}

/// Whether the host's collectives use counted fabric transfers (CFT). NCCL: `ncclHostCftMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclHostCftMode_t")]
#[non_exhaustive]
pub enum HostCftMode {
    /// Use CFT. NCCL: `ncclHostCftEnable`.
    Enable = 1,
    /// Do not use CFT. NCCL: `ncclHostCftDisable`.
    Disable = 2,
    /// Use CFT where possible. NCCL: `ncclHostCftFallback`.
    Fallback = 3,
}

/// How a communicator's operations are captured in CUDA graphs. NCCL: `graphUsageMode`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GraphUsageMode {
    /// Operations are in no graph.
    NoGraph = 0,
    /// Operations are in one graph, and nothing runs concurrently.
    OneGraph = 1,
    /// Operations are in several graphs, or concurrent with operations outside of graphs.
    Mixed = 2,
}

/// A setting that NCCL takes as an int.
trait Setting: Copy {
    /// Returns `None` if the value does not fit or is not valid.
    fn to_int(self) -> Option<c_int>;
}

macro_rules! ints {
    ($( $type:ty: |$value:ident| $int:expr; )*) => { $(
        impl Setting for $type {
            fn to_int(self) -> Option<c_int> {
                let $value = self;
                $int
            }
        }
    )* };
}

ints! {
    bool: |value| Some(value.into());
    u32: |value| value.try_into().ok();
    CtaPolicy: |policy| CtaPolicy::all().contains(policy).then_some(policy.bits());
    // Every bit is valid: `DISABLE` has those of later versions too.
    NvlsHostMode: |mode| Some(mode.bits());
    HostCftMode: |mode| Some(mode as c_int);
    GraphUsageMode: |mode| Some(mode as c_int);
}

/// Declares [`CommConfig`]: for each setting its documentation, type, NCCL's name and the first
/// NCCL version with it.
macro_rules! settings {
    (numbers { $(
        $(#[$doc:meta])* $name:ident: $type:ty = $field:literal
            since ($major:literal, $minor:literal, $patch:literal);
    )* } texts { $(
        $(#[$text_doc:meta])* $text:ident = $text_field:literal
            since ($text_major:literal, $text_minor:literal, $text_patch:literal);
    )* }) => {
        /// The configuration of a communicator. NCCL: `ncclConfig_t`.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[doc(alias = "ncclConfig_t")]
        #[must_use]
        pub struct CommConfig {
            $( $name: Option<$type>, )*
            $( $text: Option<String>, )*
        }

        impl CommConfig {
            $(
                $(#[$doc])*
                ///
                #[doc = concat!(
                    "NCCL: `", $field, "`, since ", $major, ".", $minor, ".", $patch, "."
                )]
                pub fn $name(mut self, value: $type) -> Self {
                    self.$name = Some(value);
                    self
                }
            )*
            $(
                $(#[$text_doc])*
                ///
                #[doc = concat!(
                    "NCCL: `", $text_field, "`, since ",
                    $text_major, ".", $text_minor, ".", $text_patch, "."
                )]
                pub fn $text(mut self, value: impl Into<String>) -> Self {
                    self.$text = Some(value.into());
                    self
                }
            )*

            /// Returns the name and value of each setting that is set, but not of the label, which
            /// may differ between ranks.
            pub(crate) fn describe(&self) -> Vec<(String, String)> {
                let numbers = [$((
                    stringify!($name),
                    self.$name.as_ref().map(|value| format!("{value:?}")),
                )),*];
                let texts = [$( (stringify!($text), self.$text.clone()) ),*];
                let all = numbers.into_iter().chain(texts);
                all.filter(|(name, _)| *name != "comm_name")
                    .filter_map(|(name, value)| Some((name.to_owned(), value?)))
                    .collect()
            }

            /// Converts to NCCL's struct, for this library.
            ///
            /// # Errors
            ///
            /// [`NcclError::Unsupported`] for a setting that the library does not know,
            /// [`Error::InvalidInput`] for an invalid one.
            pub(crate) fn lower(&self, library: Loaded<'_>) -> Result<LoweredConfig> {
                self.check()?;
                let mut raw = Config::new();
                // An older library has an older version of the struct, which is a prefix of this
                // one.
                raw.version = raw.version.min(library.version.code());
                $( if let Some(value) = self.$name {
                    let needs = NcclVersion { major: $major, minor: $minor, patch: $patch };
                    library.require(concat!("ncclConfig_t::", $field), needs)?;
                    raw.$name = int(stringify!($name), value)?;
                } )*
                $( let $text = self.$text.as_deref().map(|value| {
                    let needs = NcclVersion {
                        major: $text_major, minor: $text_minor, patch: $text_patch,
                    };
                    library.require(concat!("ncclConfig_t::", $text_field), needs)?;
                    text(stringify!($text), value)
                }).transpose()?; )*
                Ok(LoweredConfig::new(raw, $($text),*))
            }
        }
    };
}

settings! {
    numbers {
        /// Whether calls wait until they are done. If not, they return while NCCL works in the
        /// background, and the communicator can be used once it is ready. Default: true.
        blocking: bool = "blocking" since (2, 14, 0);
        /// Thread blocks in a cluster of NCCL's kernels, 0 to 8. Default: 4 from compute capability
        /// 9.0 on, else 0.
        #[doc(alias = "cgaClusterSize")]
        cga_cluster_size: u32 = "cgaClusterSize" since (2, 17, 0);
        /// The fewest thread blocks of a kernel, at least 1. Default: 1.
        #[doc(alias = "minCTAs")]
        min_ctas: u32 = "minCTAs" since (2, 17, 0);
        /// The most thread blocks of a kernel, at least 1 and at least `min_ctas`. Default: 32;
        /// NCCL caps it at the number of its channels.
        #[doc(alias = "maxCTAs")]
        max_ctas: u32 = "maxCTAs" since (2, 17, 0);
        /// Whether communicators split from this one share its resources. Default: false.
        #[doc(alias = "splitShare")]
        split_share: bool = "splitShare" since (2, 18, 0);
        /// The traffic class or service level of the network. Default: the network plugin's, such
        /// as NCCL_IB_TC.
        #[doc(alias = "trafficClass")]
        traffic_class: u32 = "trafficClass" since (2, 26, 0);
        /// Whether switches may reduce (CollNet). Default: false.
        #[doc(alias = "collnetEnable")]
        collnet_enable: bool = "collnetEnable" since (2, 27, 0);
        /// How multiprocessors are used. Default: [`CtaPolicy::DEFAULT`].
        #[doc(alias = "CTAPolicy")]
        cta_policy: CtaPolicy = "CTAPolicy" since (2, 27, 0);
        /// Whether communicators that shrink from this one share its resources. Default: false.
        #[doc(alias = "shrinkShare")]
        shrink_share: bool = "shrinkShare" since (2, 27, 0);
        /// Thread blocks of NVLS kernels, at least 1. Default: NCCL's choice.
        #[doc(alias = "nvlsCTAs")]
        nvls_ctas: u32 = "nvlsCTAs" since (2, 27, 0);
        /// Channels to each peer over the network, at least 1. Default: NCCL's choice.
        #[doc(alias = "nChannelsPerNetPeer")]
        n_channels_per_net_peer: u32 = "nChannelsPerNetPeer" since (2, 28, 0);
        /// Whether operations are scheduled for NVLink first. Default: false.
        #[doc(alias = "nvlinkCentricSched")]
        nvlink_centric_sched: bool = "nvlinkCentricSched" since (2, 28, 0);
        /// How operations are captured in graphs. Default: [`GraphUsageMode::Mixed`].
        #[doc(alias = "graphUsageMode")]
        graph_usage_mode: GraphUsageMode = "graphUsageMode" since (2, 29, 0);
        /// Contexts of the host's one-sided operations; 0 turns these off. Default: 1.
        #[doc(alias = "numRmaCtx")]
        num_rma_ctx: u32 = "numRmaCtx" since (2, 29, 0);
        /// Peers that two-sided operations are tuned for. Default: the number of ranks.
        #[doc(alias = "maxP2pPeers")]
        max_p2p_peers: u32 = "maxP2pPeers" since (2, 30, 0);
        /// Whether captured operations keep the order of their streams. False needs a
        /// `graph_usage_mode` other than [`GraphUsageMode::Mixed`]. Default: true.
        #[doc(alias = "graphStreamOrdering")]
        graph_stream_ordering: bool = "graphStreamOrdering" since (2, 30, 5);
        /// Whether operations of several communicators on one GPU run in the order in which the
        /// host issued them. Default: false.
        #[doc(alias = "launchOrderImplicit")]
        launch_order_implicit: bool = "launchOrderImplicit" since (2, 31, 0);
        /// Signals per peer and context of the host's one-sided operations. Default: 1.
        #[doc(alias = "numRmaSig")]
        num_rma_sig: u32 = "numRmaSig" since (2, 31, 0);
        /// Whether one-sided operations are initialized with the communicator, not at first use.
        /// Default: false.
        #[doc(alias = "rmaEagerInit")]
        rma_eager_init: bool = "rmaEagerInit" since (2, 31, 0);
        /// Whether collectives use CFT. The same on every rank. Default: NCCL's choice.
        #[doc(alias = "hostCftMode")]
        host_cft_mode: HostCftMode = "hostCftMode" since (2, 31, 1);
        /// Which uses of NVLS are disabled for collectives. Default: NCCL's choice.
        #[doc(alias = "nvlsHostMode")]
        nvls_host_mode: NvlsHostMode = "nvlsHostMode" since (2, 32, 0);
    }
    texts {
        /// The name of the network plugin, case-insensitive. Default: the first that works.
        #[doc(alias = "netName")]
        net_name = "netName" since (2, 17, 0);
        /// A label in NCCL's log and profilers. Default: none.
        #[doc(alias = "commName")]
        comm_name = "commName" since (2, 27, 0);
    }
}

impl CommConfig {
    /// Returns NCCL's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether calls on the communicator wait until they are done.
    #[must_use]
    pub fn is_blocking(&self) -> bool {
        self.blocking.unwrap_or(true)
    }

    fn check(&self) -> Result<()> {
        check_ctas(self.min_ctas, self.max_ctas, self.nvls_ctas)?;
        check_cluster(self.cga_cluster_size)?;
        at_least_one("n_channels_per_net_peer", self.n_channels_per_net_peer)?;
        let mixed = matches!(self.graph_usage_mode, None | Some(GraphUsageMode::Mixed));
        if self.graph_stream_ordering == Some(false) && mixed {
            return Err(Error::invalid(
                "graph_stream_ordering(false) needs graph_usage_mode NoGraph or OneGraph; the \
                 default is Mixed",
            ));
        }
        Ok(())
    }
}

fn check_ctas(min: Option<u32>, max: Option<u32>, nvls: Option<u32>) -> Result<()> {
    at_least_one("min_ctas", min)?;
    at_least_one("max_ctas", max)?;
    at_least_one("nvls_ctas", nvls)?;
    match (min, max) {
        (Some(min), Some(max)) if min > max => {
            Err(Error::invalid(format!("min_ctas({min}) is above max_ctas({max})")))
        }
        _ => Ok(()),
    }
}

fn check_cluster(size: Option<u32>) -> Result<()> {
    match size {
        Some(size @ 9..) => {
            Err(Error::invalid(format!("cga_cluster_size({size}): a cluster has 0 to 8 blocks")))
        }
        _ => Ok(()),
    }
}

fn at_least_one(setting: &str, value: Option<u32>) -> Result<()> {
    if value == Some(0) {
        return Err(Error::invalid(format!("{setting}(0): it must be 1 or more, or unset")));
    }
    Ok(())
}

/// The library that a configuration is for.
#[derive(Clone, Copy)]
pub(crate) struct Loaded<'a> {
    /// The version.
    pub version: NcclVersion,
    /// The file.
    pub path: &'a Path,
}

impl Loaded<'_> {
    /// Refuses `what` unless the library is at least of version `needs`.
    fn require(self, what: &'static str, needs: NcclVersion) -> Result<()> {
        let Self { version: has, path } = self;
        if has < needs {
            return Err(NcclError::Unsupported { what, needs, has, path: path.to_owned() }.into());
        }
        Ok(())
    }
}

fn int(setting: &str, value: impl Setting + std::fmt::Debug) -> Result<c_int> {
    value.to_int().ok_or_else(|| Error::invalid(format!("{setting}({value:?}) is not valid")))
}

fn text(setting: &str, value: &str) -> Result<CString> {
    CString::new(value)
        .map_err(|_| Error::invalid(format!("{setting}({value:?}): a NUL ends a C string")))
}

#[cfg(test)]
mod tests;
