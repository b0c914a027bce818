//! Why a device communicator cannot be created.

use devcomm_types::{GinConnectionType, GinType, Team};

use crate::communicator::properties::GinTypes;

/// Why a device communicator cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequirementsRefusal {
    /// NCCL's device functions do not work between these ranks.
    #[error(
        "NCCL offers no device communication here (deviceApiSupport is false); it needs CUDA peer \
         access between all GPUs of a host, NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE not 0, and a \
         network that GIN can use if the ranks span several NVLink domains"
    )]
    NoDeviceApi,
    /// Multicast was asked for where there is none.
    #[error("{what} needs multicast, but {why}")]
    NoMultimem {
        /// The requested resource.
        what: &'static str,
        /// Why there is none.
        why: &'static str,
    },
    /// A network resource was asked for, but no connection.
    #[error(
        "{what} need a network connection, but none is asked for; add \
         gin_connection(GinConnectionType::Full), or Rail"
    )]
    NotConnected {
        /// The requested resource.
        what: &'static str,
    },
    /// Hybrid barriers were asked for without a connection, where load and store reach every rank.
    #[error(
        "{count} hybrid barriers need a network connection, and none is asked for; all {n_ranks} \
         ranks are in one LSA team, so use lsa_barriers({count})"
    )]
    BarriersWithoutNetwork {
        /// Barriers asked for.
        count: u32,
        /// Ranks of the communicator.
        n_ranks: usize,
    },
    /// A connection was asked for where no network works for kernels.
    #[error(
        "a network connection of type {connection} was asked for, but no network back end for \
         kernels (GIN) works on all ranks{}. {why}",
        if *one_lsa_team { ", which are all in one LSA team and need none" } else { "" }
    )]
    NoGin {
        /// The connection asked for.
        connection: GinConnectionType,
        /// Whether load and store reach every rank.
        one_lsa_team: bool,
        /// The facilities of this machine, and the requirements of each back end.
        why: String,
    },
    /// A connection of every rank was asked for, but the network connects rails only.
    #[error(
        "a network connection of type FULL was asked for, but the network connects rails only \
         (ginType is none, railedGinType is {railed}): each rank reaches only the \
         rank with its LSA rank in each other LSA team; use GinConnectionType::Rail"
    )]
    OnlyRail {
        /// The back end of the rails.
        railed: GinType,
    },
    /// A connection that this crate does not know.
    #[error(
        "there is no network connection of {connection}; there are FULL, RAIL and CUSTOM_STRIDE"
    )]
    UnknownConnection {
        /// The connection asked for.
        connection: GinConnectionType,
    },
    /// A back end that is not available.
    #[error("network back end {asked} was asked for; the available ones are: {available}. {why}")]
    NoSuchGinType {
        /// The back end asked for.
        asked: GinType,
        /// The available back ends.
        available: GinTypes,
        /// The facilities of this machine, and the requirements of that back end.
        why: String,
    },
    /// No back end has the signals asked for.
    #[error(
        "{} were asked for, but no back end among {available} has them: EFA_GDA has neither \
         strong nor VA signals; see gin_strong_signals and gin_va_signals",
        signals(*strong, *va)
    )]
    NoSuchSignals {
        /// Whether strong signals were requested.
        strong: bool,
        /// Whether VA signals were requested.
        va: bool,
        /// The back ends that were considered.
        available: GinTypes,
    },
    /// No contexts at all.
    #[error("gin_contexts(0) leaves kernels nothing to communicate with; ask for 1 or more")]
    NoContexts,
    /// World barriers were asked for, but the connection does not reach every rank.
    #[error(
        "{count} world GIN barriers were asked for, but a connection of type {connection} with \
         stride {stride} does not reach every rank; use rail_gin_barriers, or \
         GinConnectionType::Full"
    )]
    WorldBarriersNotConnected {
        /// Barriers asked for.
        count: u32,
        /// The connection asked for.
        connection: GinConnectionType,
        /// The stride in ranks.
        stride: u32,
    },
    /// GIN barriers were asked for in a team whose ranks the connection does not reach.
    #[error(
        "GIN barriers of a team with stride {} were asked for, but the connection reaches \
         multiples of {stride} ranks only",
        team.stride
    )]
    TeamNotConnected {
        /// The team.
        team: Team,
        /// The connection's stride in ranks.
        stride: u32,
    },
    /// The network supports no custom stride.
    #[error(
        "a custom stride was asked for, but the network's connections are not strided \
         (ginMinStride is INT_MAX); use GinConnectionType::Rail, or Full"
    )]
    NoCustomStride,
    /// A custom stride that the network does not support.
    #[error(
        "gin_custom_stride({stride}) was asked for, but here it must be a multiple of \
         {multiple_of} between {multiple_of} and {max}, the size of an LSA team"
    )]
    BadStride {
        /// The stride asked for, in ranks.
        stride: u32,
        /// The least stride, in ranks; other strides are multiples of it.
        multiple_of: u32,
        /// The greatest stride, in ranks.
        max: u32,
    },
    /// CFT was asked for where it is not supported.
    #[error(
        "{what} was asked for, but CFT does not work on all ranks here ({property} is false); it \
         needs a driver of CUDA 13.3 or newer, hardware for it, and NCCL_CFT_ENABLE not 0"
    )]
    NoCft {
        /// The requested resource.
        what: &'static str,
        /// NCCL's property.
        property: &'static str,
    },
    /// A team whose numbers are invalid.
    #[error(
        "{team:?} is not valid: its rank must be 0 to n_ranks - 1, its stride not 0, and its \
         members ranks of the communicator"
    )]
    NotATeam {
        /// The team.
        team: Team,
    },
    /// A team with members that this rank does not reach by load and store.
    #[error(
        "{what} of {team:?} need a team of ranks that reach each other by load and store, but this \
         rank's LSA team has {lsa_size} ranks, consecutive in the communicator"
    )]
    TeamBeyondLsa {
        /// The requested resource.
        what: &'static str,
        /// The team.
        team: Team,
        /// Ranks of an LSA team.
        lsa_size: usize,
    },
    /// More than NCCL can count or address.
    #[error("{asked} {what} were asked for, but the limit is {limit}")]
    TooMany {
        /// The requested resource.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The largest possible number.
        limit: u64,
    },
    /// An alignment that is not a power of two.
    #[error("a resource buffer was asked for with alignment {align}, which is not a power of two")]
    BadAlign {
        /// The alignment in bytes.
        align: usize,
    },
}

impl RequirementsRefusal {
    /// Returns whether another machine may meet the requirements.
    #[must_use]
    pub fn is_hardware(&self) -> bool {
        !matches!(
            self,
            Self::NotConnected { .. }
                | Self::UnknownConnection { .. }
                | Self::NoContexts
                | Self::WorldBarriersNotConnected { .. }
                | Self::TeamNotConnected { .. }
                | Self::NotATeam { .. }
                | Self::TooMany { .. }
                | Self::BadAlign { .. }
        )
    }
}

fn signals(strong: bool, va: bool) -> &'static str {
    match (strong, va) {
        (true, true) => "strong and VA signals",
        (true, false) => "strong signals",
        _ => "VA signals",
    }
}
