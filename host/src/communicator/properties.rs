//! The properties of a communicator: what it and its machine support.

use devcomm_types::{GinConnectionType, GinType, Team};

use devcomm_sys::nccl::CommProperties;

/// What a communicator supports, which NCCL determines over all ranks; only `rank`, `cuda_device`
/// and `nvml_device` differ between ranks.
///
/// NCCL: `ncclCommProperties_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclCommProperties_t")]
#[non_exhaustive]
pub struct Properties {
    /// This rank.
    pub rank: usize,
    /// Number of ranks. NCCL: `nRanks`.
    pub n_ranks: usize,
    /// CUDA's ordinal of the device. NCCL: `cudaDev`.
    pub cuda_device: i32,
    /// NVML's ordinal of the device. NCCL: `nvmlDev`.
    pub nvml_device: i32,
    /// Whether device communicators and windows work here. NCCL: `deviceApiSupport`.
    pub device_api: bool,
    /// Whether multicast works here. NCCL: `multimemSupport`.
    pub multimem: bool,
    /// The number of LSA teams. With 1, all ranks reach each other by load and store. NCCL:
    /// `nLsaTeams`.
    pub n_lsa_teams: usize,
    /// The network back end that NCCL chooses for kernels that reach every rank: the first that
    /// works in its order of preference, or [`GinType::None`]. NCCL: `ginType`.
    pub gin_type: GinType,
    /// The network back end that NCCL chooses for kernels that reach the ranks of their rail team,
    /// or [`GinType::None`]. NCCL: `railedGinType`.
    pub railed_gin_type: GinType,
    /// All network back ends that work here. NCCL: `ginSupport`.
    pub gin_types: GinTypes,
    /// Whether the host's one-sided operations work. NCCL: `hostRmaSupport`.
    pub host_rma: bool,
    /// A hash that is the same on all ranks of this communicator and, most likely, different for
    /// every other communicator. NCCL: `commHash`.
    pub comm_hash: u64,
    /// A stride for [`GinConnectionType::CustomStride`] is a multiple of this number of ranks;
    /// `None` if the network supports no custom stride. NCCL: `ginMinStride`, which is then
    /// `INT_MAX`.
    pub gin_min_stride: Option<u32>,
    /// The widest connection that the network supports: every rank, the rails, or none. NCCL:
    /// `ginConnectionType`.
    pub gin_connection_type: GinConnectionType,
    /// Bytes of the `ncclDevComm` that the loaded NCCL writes for device code of its own version.
    /// NCCL: `devCommRuntimeVersionSize`.
    pub dev_comm_runtime_version_size: usize,
    /// Whether counted fabric transfers (CFT) work here. NCCL: `cftSupport`.
    pub cft: bool,
    /// Whether multicast over CFT works here. NCCL: `cftMulticastSupport`.
    pub cft_multicast: bool,
    /// Whether windows can count CFT writes here. NCCL: `cftCountedSupport`.
    pub cft_counted: bool,
}

impl Properties {
    /// Returns the number of ranks of an LSA team, which is the same for all teams.
    #[must_use]
    pub fn lsa_size(&self) -> usize {
        // Never 0, whatever NCCL has reported: callers divide by it.
        (self.n_ranks / self.n_lsa_teams.max(1)).max(1)
    }

    /// Returns the team of all ranks, with this rank's index in it.
    pub(crate) fn world_team(&self) -> Team {
        // These were NCCL's ints.
        let int = |value: usize| i32::try_from(value).unwrap_or(i32::MAX);
        Team { n_ranks: int(self.n_ranks), rank: int(self.rank), stride: 1 }
    }

    /// Returns this rank's LSA team. LSA teams consist of consecutive ranks and have the same size.
    pub(crate) fn lsa_team(&self) -> Team {
        self.world_team().inner_factor(self.lsa_size_i32())
    }

    /// Returns this rank's rail team.
    pub(crate) fn rail_team(&self) -> Team {
        self.world_team().outer_factor(self.lsa_size_i32())
    }

    fn lsa_size_i32(&self) -> i32 {
        i32::try_from(self.lsa_size()).unwrap_or(i32::MAX)
    }
}

impl From<CommProperties> for Properties {
    fn from(raw: CommProperties) -> Self {
        // NCCL's counts are not negative.
        let count = |value: i32| usize::try_from(value).unwrap_or(0);
        Self {
            rank: count(raw.rank),
            n_ranks: count(raw.n_ranks),
            cuda_device: raw.cuda_dev,
            nvml_device: raw.nvml_dev,
            device_api: raw.device_api_support != 0,
            multimem: raw.multimem_support != 0,
            n_lsa_teams: count(raw.n_lsa_teams),
            gin_type: GinType::from_raw(raw.gin_type),
            railed_gin_type: GinType::from_raw(raw.railed_gin_type),
            gin_types: GinTypes::from_flags(&raw.gin_support),
            host_rma: raw.host_rma_support != 0,
            comm_hash: raw.comm_hash,
            gin_min_stride: match raw.gin_min_stride {
                ..=0 | i32::MAX => None,
                stride => u32::try_from(stride).ok(),
            },
            gin_connection_type: GinConnectionType::from_raw(raw.gin_connection_type),
            dev_comm_runtime_version_size: raw.dev_comm_runtime_version_size,
            cft: raw.cft_support != 0,
            cft_multicast: raw.cft_multicast_support != 0,
            cft_counted: raw.cft_counted_support != 0,
        }
    }
}

/// A set of network back ends. NCCL: the 64 flags of `ginSupport`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "ginSupport")]
pub struct GinTypes(u64);

impl GinTypes {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// Returns the back ends whose flag is not 0.
    fn from_flags(flags: &[u8; 64]) -> Self {
        let bits = flags.iter().enumerate().map(|(bit, &flag)| u64::from(flag != 0) << bit);
        Self(bits.fold(0, |all, bit| all | bit)).without_none()
    }

    /// Removes `NCCL_GIN_TYPE_NONE`, which is not a back end, whatever its flag.
    fn without_none(self) -> Self {
        Self(self.0 & !1)
    }

    /// Returns whether `gin_type` is in the set.
    #[must_use]
    pub fn contains(self, gin_type: GinType) -> bool {
        self.0 & bit(gin_type) != 0
    }

    /// Returns whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the back ends in the set, in order of NCCL's numbers.
    pub fn iter(self) -> impl Iterator<Item = GinType> {
        (0..64).map(GinType::from_raw).filter(move |&gin_type| self.contains(gin_type))
    }
}

/// Returns the bit of a back end in the set; 0 for one that is not among NCCL's 64 flags.
fn bit(gin_type: GinType) -> u64 {
    match gin_type.raw() {
        number @ 1..64 => 1 << number,
        _ => 0,
    }
}

impl FromIterator<GinType> for GinTypes {
    fn from_iter<I: IntoIterator<Item = GinType>>(types: I) -> Self {
        Self(types.into_iter().fold(0, |all, gin_type| all | bit(gin_type)))
    }
}

/// The text is, for example, `PROXY, GDAKI`; `none` for the empty set.
impl std::fmt::Display for GinTypes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (i, gin_type) in self.iter().enumerate() {
            write!(f, "{}{gin_type}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_of_nccls_is_carried_over() {
        let mut raw = CommProperties::new();
        (raw.rank, raw.n_ranks, raw.cuda_dev, raw.nvml_dev) = (5, 16, 1, 3);
        (raw.device_api_support, raw.multimem_support, raw.host_rma_support) = (1, 2, 255);
        (raw.n_lsa_teams, raw.comm_hash) = (4, u64::MAX);
        (raw.gin_type, raw.railed_gin_type, raw.gin_connection_type) = (0, 3, 2);
        (raw.gin_min_stride, raw.dev_comm_runtime_version_size) = (4, 248);
        (raw.cft_support, raw.cft_multicast_support, raw.cft_counted_support) = (1, 0, 1);
        (raw.gin_support[0], raw.gin_support[2], raw.gin_support[3], raw.gin_support[63]) =
            (1, 1, 7, 1);
        let properties = Properties::from(raw);
        let expected = Properties {
            rank: 5,
            n_ranks: 16,
            cuda_device: 1,
            nvml_device: 3,
            device_api: true,
            multimem: true,
            n_lsa_teams: 4,
            gin_type: GinType::None,
            railed_gin_type: GinType::Gdaki,
            gin_types: [GinType::Proxy, GinType::Gdaki, GinType::Other(63)].into_iter().collect(),
            host_rma: true,
            comm_hash: u64::MAX,
            gin_min_stride: Some(4),
            gin_connection_type: GinConnectionType::Rail,
            dev_comm_runtime_version_size: 248,
            cft: true,
            cft_multicast: false,
            cft_counted: true,
        };
        assert_eq!(properties, expected);
        assert_eq!(properties.lsa_team(), Team { n_ranks: 4, rank: 1, stride: 1 });
        assert_eq!(properties.rail_team(), Team { n_ranks: 4, rank: 1, stride: 4 });
        assert_eq!(properties.world_team(), Team { n_ranks: 16, rank: 5, stride: 1 });
    }

    #[test]
    fn numbers_that_make_no_sense_are_no_panic() {
        let mut raw = CommProperties::new();
        (raw.rank, raw.n_ranks, raw.n_lsa_teams) = (-1, -1, -1);
        (raw.gin_type, raw.gin_connection_type, raw.gin_min_stride) = (99, -7, i32::MAX);
        let properties = Properties::from(raw);
        assert_eq!((properties.n_ranks, properties.n_lsa_teams, properties.lsa_size()), (0, 0, 1));
        assert_eq!(properties.gin_type, GinType::Other(99));
        assert_eq!(properties.gin_connection_type, GinConnectionType::Other(-7));
        assert_eq!(properties.gin_min_stride, None);
        assert_eq!(properties.lsa_team().n_ranks, 1);
    }

    #[test]
    fn a_set_of_back_ends_holds_what_was_put_in_and_prints_it() {
        let types: GinTypes =
            [GinType::Gpi, GinType::Proxy, GinType::None, GinType::Other(64)].into_iter().collect();
        assert_eq!(types.iter().collect::<Vec<_>>(), [GinType::Proxy, GinType::Gpi]);
        assert!(types.contains(GinType::Gpi) && !types.contains(GinType::None));
        assert!(!types.contains(GinType::Other(64)) && !types.contains(GinType::Other(-1)));
        assert_eq!(types.to_string(), "PROXY, GPI");
        assert_eq!(GinTypes::EMPTY.to_string(), "none");
    }
}
