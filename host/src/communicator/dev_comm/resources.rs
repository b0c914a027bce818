//! Additional resources of a device communicator: the requests for them, and the keys to their
//! handles.

use std::ffi::c_int;

use devcomm_types::nccl::{
    GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle, ResourceHandle,
};
use devcomm_types::{CounterRange, SignalRange, Team};

use super::RequirementsRefusal;
use crate::sys::nccl::lists::{ResourceAnswer, ResourceNode, TeamNode};

/// The unit, in bytes, of offsets in the memory of a device communicator. The handle of a resource
/// buffer is such an offset.
pub(super) const HANDLE_UNIT: usize = 128;
/// The largest total size of resource buffers: handles are 32-bit offsets.
pub(super) const MAX_BUFFER_BYTES: u64 = (HANDLE_UNIT as u64) << 32;

/// Barriers, by load and store, between the ranks of a team. A kernel gets an
/// [`LsaBarrierHandle`].
///
/// NCCL: `ncclLsaBarrierCreateRequirement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclLsaBarrierCreateRequirement")]
pub struct LsaBarriers {
    /// The team, whose ranks must be in this rank's LSA team.
    pub team: Team,
    /// The number of barriers.
    pub count: u32,
}

/// Barriers over the network between the ranks of a team. A kernel gets a [`GinBarrierHandle`].
///
/// NCCL: `ncclGinBarrierCreateRequirement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclGinBarrierCreateRequirement")]
pub struct GinBarriers {
    /// The team, whose ranks the network connection must reach.
    pub team: Team,
    /// The number of barriers.
    pub count: u32,
}

/// Memory for low-latency all-to-all sessions. A kernel gets an [`LlA2aHandle`].
///
/// NCCL: `ncclLLA2ACreateRequirement`, `ncclLLA2ACalcSlots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclLLA2ACreateRequirement")]
pub struct LlA2a {
    /// Blocks that have a session at the same time.
    pub blocks: u32,
    /// The most elements that a session receives in an epoch.
    pub max_elements: u32,
    /// Bytes of the largest element.
    pub element_size: u32,
}

impl LlA2a {
    /// Slots of 8 bytes that a session needs. NCCL: `ncclLLA2ACalcSlots`.
    #[must_use]
    #[doc(alias = "ncclLLA2ACalcSlots")]
    pub const fn slots(self) -> u64 {
        self.max_elements as u64 * self.element_size.div_ceil(8) as u64
    }
}

/// Memory in the device communicator's own window, zeroed, at the same offset on every rank. A
/// kernel gets its [`ResourceHandle`].
///
/// NCCL: `bufferSize`, `bufferAlign` of `ncclDevResourceRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclDevResourceRequirements_t")]
pub struct ResourceBuffer {
    /// Bytes.
    pub bytes: usize,
    /// Alignment in bytes of its offset in the window, a power of two. At least 128 is used.
    pub align: usize,
}

/// Signals, which other ranks write over the network. A kernel gets a [`SignalRange`].
///
/// NCCL: `ginSignalCount` of `ncclDevResourceRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signals {
    /// The number of signals.
    pub count: u32,
}

/// Counters, which count this rank's puts. A kernel gets a [`CounterRange`].
///
/// NCCL: `ginCounterCount` of `ncclDevResourceRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// The number of counters.
    pub count: u32,
}

/// An additional team. A kernel gets its [`MultimemHandle`], or `None` if no multicast was asked
/// for.
///
/// NCCL: `ncclTeamRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclTeamRequirements_t")]
pub struct TeamMultimem {
    /// The team, whose ranks must be in this rank's LSA team.
    pub team: Team,
    /// Whether the team needs a multicast mapping; without one, NCCL ignores the team.
    pub multimem: bool,
}

/// What [`DevCommRequirements::add`](super::DevCommRequirements::add) takes: [`LsaBarriers`],
/// [`GinBarriers`], [`LlA2a`], [`ResourceBuffer`], [`Signals`], [`Counters`] or [`TeamMultimem`].
pub trait ResourceRequest: Copy + PartialEq + Into<Resource> + sealed::Sealed {
    /// The handle by which a kernel uses the resource.
    type Handle;

    /// Returns the handle, from what NCCL returned.
    #[doc(hidden)]
    fn handle(self, answer: Answer) -> Self::Handle;
}

/// The key to a requested resource. [`DevCommResource::resource`](super::DevCommResource::resource)
/// takes it and returns the handle, whose type depends on `R`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceKey<R> {
    pub(super) index: usize,
    pub(super) request: R,
}

impl<R: Copy> ResourceKey<R> {
    /// Returns the request.
    #[must_use]
    pub fn request(&self) -> R {
        self.request
    }
}

/// A resource of any kind.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    LsaBarriers(LsaBarriers),
    GinBarriers(GinBarriers),
    LlA2a(LlA2a),
    Buffer(ResourceBuffer),
    Signals(Signals),
    Counters(Counters),
    Team(TeamMultimem),
}

/// NCCL's answer to a request.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Answer(pub(super) ResourceAnswer, pub(super) MultimemHandle);

mod sealed {
    pub trait Sealed {}
}

macro_rules! requests {
    ($(
        $request:ident as $variant:ident gives $handle:ty,
        $self:ident $answer:ident $multimem:ident => $make:expr;
    )*) => {$(
        impl sealed::Sealed for $request {}

        impl From<$request> for Resource {
            fn from(request: $request) -> Self {
                Self::$variant(request)
            }
        }

        impl ResourceRequest for $request {
            type Handle = $handle;

            fn handle($self, Answer($answer, $multimem): Answer) -> $handle {
                $make
            }
        }
    )*};
}

// The casts lose nothing: `Resource::node` has refused numbers that do not fit NCCL's int.
requests! {
    LsaBarriers as LsaBarriers gives LsaBarrierHandle, self answer _multimem =>
        LsaBarrierHandle { buffer: answer.buffer, n_barriers: self.count as i32 };
    GinBarriers as GinBarriers gives GinBarrierHandle, self answer _multimem =>
        GinBarrierHandle { signal0: answer.first_signal, unused: 0 };
    LlA2a as LlA2a gives LlA2aHandle, self answer _multimem =>
        LlA2aHandle { buffer: answer.buffer, n_slots: self.slots() as u32 };
    ResourceBuffer as Buffer gives ResourceHandle, self answer _multimem => answer.buffer;
    Signals as Signals gives SignalRange, self answer _multimem =>
        SignalRange { first: answer.first_signal, count: self.count };
    Counters as Counters gives CounterRange, self answer _multimem =>
        CounterRange { first: answer.first_counter, count: self.count };
    TeamMultimem as Team gives Option<MultimemHandle>, self _answer multimem =>
        (self.multimem && !multimem.base.is_null()).then_some(multimem);
}

/// A node of NCCL's resource list or team list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Resource(ResourceNode),
    Team(TeamNode),
}

impl Resource {
    /// Returns the node, with the sizes that NCCL's own functions compute.
    pub(super) fn node(self) -> Result<Node, RequirementsRefusal> {
        let node = match self {
            Self::LsaBarriers(LsaBarriers { team, count }) => {
                // 32-bit words per barrier: two epochs, a multicast inbox, one inbox per rank.
                let words = 3 + u64::from(team_size(team)?);
                int("barriers of a team", count)?;
                ResourceNode { buffer: (bytes(u64::from(count), words, 4)?, 4), ..EMPTY_NODE }
            }
            Self::GinBarriers(GinBarriers { team, count }) => {
                let signals = u64::from(team_size(team)?) * u64::from(count);
                int("barriers of a team", count)?;
                ResourceNode {
                    signals: int("signals of a team's GIN barriers", signals)?,
                    ..EMPTY_NODE
                }
            }
            Self::LlA2a(request) => {
                int("blocks of an LL all-to-all", request.blocks)?;
                int("slots of an LL all-to-all", request.slots())?;
                // Lines of 16 bytes per block: a header and two banks of slots.
                let lines = 1 + 2 * request.slots();
                ResourceNode {
                    buffer: (bytes(u64::from(request.blocks), lines, 16)?, 16),
                    ..EMPTY_NODE
                }
            }
            Self::Buffer(ResourceBuffer { align, .. }) if !align.is_power_of_two() => {
                return Err(RequirementsRefusal::BadAlign { align });
            }
            Self::Buffer(ResourceBuffer { bytes, align }) => {
                ResourceNode { buffer: (bytes, align), ..EMPTY_NODE }
            }
            Self::Signals(Signals { count }) => {
                ResourceNode { signals: int("signals", count)?, ..EMPTY_NODE }
            }
            Self::Counters(Counters { count }) => {
                ResourceNode { counters: int("counters", count)?, ..EMPTY_NODE }
            }
            Self::Team(TeamMultimem { team, multimem }) => {
                team_size(team)?;
                return Ok(Node::Team(TeamNode { team, multimem }));
            }
        };
        Ok(Node::Resource(node))
    }

    /// Returns the team of the resource, if it has one.
    pub(super) fn team(self) -> Option<Team> {
        match self {
            Self::LsaBarriers(LsaBarriers { team, .. })
            | Self::GinBarriers(GinBarriers { team, .. })
            | Self::Team(TeamMultimem { team, .. }) => Some(team),
            Self::LlA2a(_) | Self::Buffer(_) | Self::Signals(_) | Self::Counters(_) => None,
        }
    }
}

/// What ranks compare: not a team's `rank`, which differs between ranks, but its size and stride.
impl std::fmt::Display for Resource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |team: Team| format!("{} ranks, stride {}", team.n_ranks, team.stride);
        match *self {
            Self::LsaBarriers(LsaBarriers { team, count }) => {
                write!(f, "{count} LSA barriers of a team of {}", of(team))
            }
            Self::GinBarriers(GinBarriers { team, count }) => {
                write!(f, "{count} GIN barriers of a team of {}", of(team))
            }
            Self::LlA2a(LlA2a { blocks, max_elements, element_size }) => write!(
                f,
                "LL all-to-all for {blocks} blocks of {max_elements} elements of {element_size} \
                 bytes"
            ),
            Self::Buffer(ResourceBuffer { bytes, align }) => {
                write!(f, "a buffer of {bytes} bytes aligned to {align}")
            }
            Self::Signals(Signals { count }) => write!(f, "{count} signals"),
            Self::Counters(Counters { count }) => write!(f, "{count} counters"),
            Self::Team(TeamMultimem { team, multimem }) => {
                let multimem = if multimem { "with" } else { "without" };
                write!(f, "a team of {} {multimem} multicast", of(team))
            }
        }
    }
}

const EMPTY_NODE: ResourceNode = ResourceNode { buffer: (0, 0), signals: 0, counters: 0 };

/// Returns the number of ranks of a team whose numbers are valid by themselves.
fn team_size(team: Team) -> Result<u32, RequirementsRefusal> {
    let rank_is_valid = 0 <= team.rank && team.rank < team.n_ranks;
    match u32::try_from(team.n_ranks) {
        Ok(n_ranks) if rank_is_valid && team.stride != 0 => Ok(n_ranks),
        _ => Err(RequirementsRefusal::NotATeam { team }),
    }
}

/// Returns the size in bytes of `count` times `each` units of `unit` bytes.
fn bytes(count: u64, each: u64, unit: u64) -> Result<usize, RequirementsRefusal> {
    let bytes = count.checked_mul(each).and_then(|all| all.checked_mul(unit));
    bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or(RequirementsRefusal::TooMany {
        what: "bytes of a resource",
        asked: u64::MAX,
        limit: MAX_BUFFER_BYTES,
    })
}

/// Returns `value` as NCCL's int.
pub(super) fn int(what: &'static str, value: impl Into<u64>) -> Result<c_int, RequirementsRefusal> {
    let asked = value.into();
    c_int::try_from(asked).map_err(|_| RequirementsRefusal::TooMany {
        what,
        asked,
        limit: c_int::MAX as u64,
    })
}
