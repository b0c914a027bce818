//! What a device communicator of a [`Simulator`](crate::Simulator) is made with.

use std::rc::Rc;

use devcomm_types::GinConnectionType;
use devcomm_types::kernel::IntoArg;
use devcomm_types::nccl::{
    self, GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle, ResourceHandle,
};
use devcomm_types::{CounterRange, SignalRange};

use super::plan::{self, Asked};
use super::{CommState, make};
use crate::error::{Error, Result};
use crate::nccl::barrier_words;
use crate::ranks::Ranks;

/// A device communicator of every rank. NCCL: `ncclDevComm`.
#[doc(alias = "ncclDevComm")]
pub struct DevComm {
    state: Rc<CommState>,
    /// What was asked for, and where it is among the resources or teams.
    resources: Vec<(Resource, usize)>,
}

impl DevComm {
    /// A device communicator in every one of these ranks.
    pub(crate) fn new(of: &Ranks, config: &DevCommConfig, id: u32) -> Result<Self> {
        let asked = config.asked(of.lsa_ranks)?;
        // Every `n * stride` neighbours are `stride` teams.
        let first = |team: usize, rank: usize| {
            let (n, stride) = asked.teams[team];
            let (n, stride) = (n as usize, stride as usize);
            rank - rank % (n * stride) + rank % stride
        };
        let state = Rc::new(make(of, &asked, id, first)?);
        let (mut resources, mut places) = (Vec::new(), [0, 0]);
        for resource in &config.resources {
            let place = &mut places[usize::from(matches!(resource, Resource::Team(_)))];
            resources.push((*resource, *place));
            *place += 1;
        }
        Ok(Self { state, resources })
    }

    /// The device communicator as an argument for `rank`'s kernel.
    ///
    /// # Panics
    ///
    /// If there is no such rank, as indexing does. (In the closure of a launch that becomes an error.)
    pub fn rank(&self, rank: usize) -> DevCommArg<'_> {
        DevCommArg { comm: &self.state.comms[rank], of: self, rank }
    }

    /// What the simulator keeps of it.
    pub(crate) fn state(&self) -> &Rc<CommState> {
        &self.state
    }
}

/// A device communicator as one rank's kernel takes it.
#[derive(Clone, Copy)]
pub struct DevCommArg<'a> {
    comm: &'a nccl::DevComm,
    of: &'a DevComm,
    rank: usize,
}

impl DevCommArg<'_> {
    /// The rank's handle of the resource that [`DevCommConfig::add`] gave this key for.
    ///
    /// # Panics
    ///
    /// For the key of another configuration, where it would open another resource. (In the closure of a launch that becomes
    /// an error.)
    pub fn resource<R: ResourceRequest>(&self, key: ResourceKey<R>) -> R::Handle {
        let (asked, place) = self.of.resources[key.index];
        assert!(asked == key.request.into(), "the key is of another configuration");
        let nothing = plan::Made { buffer: 0, first_signal: 0, first_counter: 0 };
        let state = &self.of.state;
        let (made, multimem) = match asked {
            Resource::Team(_) => (nothing, state.teams[place].handle(self.rank)),
            _ => (state.made[place], MultimemHandle::NULL),
        };
        let plan::Made { buffer, first_signal, first_counter } = made;
        key.request.handle(Made { buffer, first_signal, first_counter, multimem })
    }
}

impl std::fmt::Debug for DevCommArg<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DevCommArg").field(self.comm).finish()
    }
}

impl IntoArg<nccl::DevComm> for DevCommArg<'_> {
    fn into_arg(self) -> nccl::DevComm {
        *self.comm
    }

    fn dev_comm(&self) -> Option<&nccl::DevComm> {
        Some(self.comm)
    }
}

/// What the kernels that will use a device communicator need of it.
///
/// ```
/// use devcomm_sim::{DevCommConfig, GinConnectionType, ResourceBuffer, Signals, Simulator};
///
/// # fn main() -> devcomm_sim::Result<()> {
/// let mut config = DevCommConfig {
///     lsa_barriers: 8,
///     gin_connection: GinConnectionType::Full,
///     ..Default::default()
/// };
/// // Resources of a kernel's own: a key now, the handle when there is a device communicator.
/// let arrived = config.add(Signals { count: 4 });
/// let scratch = config.add(ResourceBuffer { bytes: 1 << 10, align: 128 });
/// let comm = Simulator::new(2)?.dev_comm(config)?;
/// assert_eq!(comm.rank(0).resource(arrived).count, 4);
/// assert_eq!(comm.rank(0).resource(scratch), comm.rank(1).resource(scratch));
/// # Ok(()) }
/// ```
///
/// NCCL: `ncclDevCommRequirements`.
#[doc(alias = "ncclDevCommRequirements")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevCommConfig {
    /// LSA barriers: one for each block of a grid, where blocks meet by themselves. NCCL: `lsaBarrierCount`.
    pub lsa_barriers: u32,
    /// Multicast addresses of the LSA team. NCCL: `lsaMultimem`.
    pub lsa_multimem: bool,
    /// Hybrid barriers between all ranks; they need a [`gin_connection`](Self::gin_connection). NCCL: `barrierCount`.
    pub barriers: u32,
    /// Barriers over the network between the ranks of the rail team. NCCL: `railGinBarrierCount`.
    pub rail_gin_barriers: u32,
    /// Barriers over the network between all ranks. NCCL: `worldGinBarrierCount`.
    pub world_gin_barriers: u32,
    /// Which ranks a kernel reaches over the network. Default: nobody. NCCL: `ginConnectionType`.
    pub gin_connection: GinConnectionType,
    /// Distance in ranks for [`GinConnectionType::CustomStride`], a divisor of the LSA team's size. Default 1. NCCL:
    /// `ginCustomStride`.
    pub gin_custom_stride: u32,
    /// Contexts. Default 4. NCCL: `ginContextCount`.
    pub gin_contexts: u32,
    /// Signals with ids from 0. NCCL: `ginSignalCount`.
    pub gin_signals: u32,
    /// Counters with ids from 0. NCCL: `ginCounterCount`.
    pub gin_counters: u32,
    /// Whether signals that do not say so are strong, the barriers' too. Default: yes. NCCL: `ginStrongSignalsRequired`.
    pub gin_strong_signals: bool,
    /// Operations that wait for the network in one context to one peer, at most; whoever posts one more waits. 0, the
    /// default: 512. NCCL: `ginQueueDepth`.
    pub gin_queue_depth: u32,
    /// What [`add`](Self::add) added. Public for the update syntax of structs.
    #[doc(hidden)]
    pub resources: Vec<Resource>,
}

impl Default for DevCommConfig {
    fn default() -> Self {
        Self {
            lsa_barriers: 0,
            lsa_multimem: false,
            barriers: 0,
            rail_gin_barriers: 0,
            world_gin_barriers: 0,
            gin_connection: GinConnectionType::None,
            gin_custom_stride: 1,
            gin_contexts: 4,
            gin_signals: 0,
            gin_counters: 0,
            gin_strong_signals: true,
            gin_queue_depth: 0,
            resources: Vec::new(),
        }
    }
}

impl DevCommConfig {
    /// Adds a resource of a kernel's own; the key opens it with [`DevCommArg::resource`](crate::DevCommArg::resource).
    ///
    /// NCCL: `resourceRequirementsList`, `teamRequirementsList`.
    #[doc(alias = "resourceRequirementsList")]
    #[doc(alias = "teamRequirementsList")]
    pub fn add<R: ResourceRequest>(&mut self, request: R) -> ResourceKey<R> {
        self.resources.push(request.into());
        ResourceKey { index: self.resources.len() - 1, request }
    }

    /// The same in NCCL's terms.
    fn asked(&self, lsa_ranks: usize) -> Result<Asked> {
        let (mut resources, mut teams) = (Vec::new(), Vec::new());
        for resource in &self.resources {
            let (ranks, stride) = match *resource {
                Resource::LsaBarriers(LsaBarriers { ranks, .. }) => (ranks, 1),
                Resource::Team(TeamMultimem { ranks, stride }) => (ranks, stride),
                _ => (1, 1),
            };
            let span = ranks as usize * stride as usize;
            if span == 0 || !lsa_ranks.is_multiple_of(span) {
                return Err(Error::Settings(format!(
                    "teams of {ranks} ranks with stride {stride}, into which LSA teams of {lsa_ranks} cannot be cut"
                )));
            }
            match resource.node() {
                Some(node) => resources.push(node),
                None => teams.push((ranks, stride)),
            }
        }
        Ok(Asked {
            lsa_barriers: self.lsa_barriers,
            lsa_multimem: self.lsa_multimem,
            barriers: self.barriers,
            rail_gin_barriers: self.rail_gin_barriers,
            world_gin_barriers: self.world_gin_barriers,
            gin_connection: self.gin_connection,
            gin_custom_stride: self.gin_custom_stride,
            gin_contexts: self.gin_contexts,
            gin_signals: self.gin_signals,
            gin_counters: self.gin_counters,
            gin_strong_signals: self.gin_strong_signals,
            gin_queue_depth: self.gin_queue_depth,
            resources,
            teams,
        })
    }
}

impl Resource {
    /// What NCCL makes of it; nothing for a team.
    fn node(self) -> Option<plan::Resource> {
        let nothing = plan::Resource { align: 1, ..plan::Resource::default() };
        Some(match self {
            Self::LsaBarriers(LsaBarriers { ranks, count }) => {
                let words = barrier_words(count as usize, ranks as usize);
                plan::Resource { bytes: words * size_of::<u32>(), ..nothing }
            }
            Self::GinBarriers(GinBarriers { ranks, count }) => {
                let signals = count.saturating_mul(ranks);
                plan::Resource { signals, barrier_ranks: Some(ranks), ..nothing }
            }
            Self::LlA2a(request @ LlA2a { blocks, .. }) => {
                let lines = usize::try_from(1 + 2 * request.slots()).unwrap_or(usize::MAX);
                let bytes = lines.saturating_mul(16).saturating_mul(blocks as usize);
                plan::Resource { bytes, ..nothing }
            }
            Self::Buffer(ResourceBuffer { bytes, align }) => {
                plan::Resource { bytes, align, ..nothing }
            }
            Self::Signals(Signals { count }) => plan::Resource { signals: count, ..nothing },
            Self::Counters(Counters { count }) => plan::Resource { counters: count, ..nothing },
            Self::Team(_) => return None,
        })
    }
}

/// Barriers between runs of `ranks` neighbours within each LSA team. A kernel gets an [`LsaBarrierHandle`].
///
/// NCCL: `ncclLsaBarrierCreateRequirement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclLsaBarrierCreateRequirement")]
pub struct LsaBarriers {
    /// Ranks of the team.
    pub ranks: u32,
    /// How many barriers.
    pub count: u32,
}

/// Barriers over the network between the ranks of a team of `ranks`. A kernel gets a [`GinBarrierHandle`].
///
/// NCCL: `ncclGinBarrierCreateRequirement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclGinBarrierCreateRequirement")]
pub struct GinBarriers {
    /// Ranks of the team.
    pub ranks: u32,
    /// How many barriers.
    pub count: u32,
}

/// Room for low-latency all-to-all sessions. A kernel gets an [`LlA2aHandle`].
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

/// Memory in the device communicator's own window, zeroed, at one offset on every rank. A kernel gets its
/// [`ResourceHandle`].
///
/// NCCL: `bufferSize`, `bufferAlign` of `ncclDevResourceRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclDevResourceRequirements_t")]
pub struct ResourceBuffer {
    /// Bytes.
    pub bytes: usize,
    /// Alignment in bytes of its offset in the window, a power of two; it is 128 at least.
    pub align: usize,
}

/// Signals, which other ranks write over the network. A kernel gets a [`SignalRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signals {
    /// How many.
    pub count: u32,
}

/// Counters, which count this rank's puts. A kernel gets a [`CounterRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// How many.
    pub count: u32,
}

/// Multicast addresses of a team of `ranks` members, `stride` apart, within each LSA team: every `ranks * stride` neighbours
/// are `stride` such teams. A kernel gets its rank's [`MultimemHandle`].
///
/// NCCL: `ncclTeamRequirements_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclTeamRequirements_t")]
pub struct TeamMultimem {
    /// Ranks of the team.
    pub ranks: u32,
    /// Distance between neighbours of the team.
    pub stride: u32,
}

/// What [`DevCommConfig::add`] takes: [`LsaBarriers`], [`GinBarriers`], [`LlA2a`], [`ResourceBuffer`], [`Signals`],
/// [`Counters`] or [`TeamMultimem`].
pub trait ResourceRequest: Copy + PartialEq + Into<Resource> + sealed::Sealed {
    /// What a kernel needs in order to use it.
    type Handle: Copy;

    /// The handle of what was made.
    #[doc(hidden)]
    fn handle(self, made: Made) -> Self::Handle;
}

/// The key to a resource that was asked for: it opens with [`DevCommArg::resource`](crate::DevCommArg::resource), and only to
/// the kind that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceKey<R> {
    index: usize,
    request: R,
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

/// What was made for a resource.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Made {
    buffer: ResourceHandle,
    first_signal: u32,
    first_counter: u32,
    multimem: MultimemHandle,
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! requests {
    ($($request:ident as $variant:ident gives $handle:ty, $self:ident $made:ident => $make:expr;)*) => {$(
        impl sealed::Sealed for $request {}

        impl From<$request> for Resource {
            fn from(request: $request) -> Self {
                Self::$variant(request)
            }
        }

        impl ResourceRequest for $request {
            type Handle = $handle;

            fn handle($self, $made: Made) -> $handle {
                $make
            }
        }
    )*};
}

requests! {
    LsaBarriers as LsaBarriers gives LsaBarrierHandle, self made =>
        LsaBarrierHandle { buffer: made.buffer, n_barriers: self.count as i32 };
    GinBarriers as GinBarriers gives GinBarrierHandle, self made =>
        GinBarrierHandle { signal0: made.first_signal, unused: 0 };
    LlA2a as LlA2a gives LlA2aHandle, self made =>
        LlA2aHandle { buffer: made.buffer, n_slots: self.slots() as u32 };
    ResourceBuffer as Buffer gives ResourceHandle, self made => made.buffer;
    Signals as Signals gives SignalRange, self made =>
        SignalRange { first: made.first_signal, count: self.count };
    Counters as Counters gives CounterRange, self made =>
        CounterRange { first: made.first_counter, count: self.count };
    TeamMultimem as Team gives MultimemHandle, self made => made.multimem;
}
