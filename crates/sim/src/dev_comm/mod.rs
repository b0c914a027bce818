//! Device communicators: what a kernel needs in order to communicate, made for every rank.

mod config;
mod plan;

use std::cell::Cell;
use std::rc::Rc;

use devcomm_types::kernel::IntoArg;
use devcomm_types::nccl::{self, MultimemHandle, ResourceWindow};

pub use self::config::{
    Counters, DevCommConfig, GinBarriers, LlA2a, LsaBarriers, ResourceBuffer, ResourceKey,
    ResourceRequest, Signals, TeamMultimem,
};
use self::config::{Made, Resource};
use self::plan::{GinPlan, Plan};
use crate::error::{Error, Result};
use crate::memory::{Memory, Owner};
use crate::multicast::Group;
use crate::nccl::{GinComm, RESOURCE_UNIT};
use crate::ranks::{Ranks, Symmetric};

/// What NCCL writes into a device communicator: version 2.32.3.
const VERSION: u32 = 23203;
/// NCCL: `NCCL_API_MAGIC`.
const MAGIC: u32 = 0xcafe_beef;
/// NCCL: `NCCL_NET_DEVICE_GIN_PROXY`.
const PROXY: u8 = 2;

/// A device communicator of every rank. NCCL: `ncclDevComm`.
#[doc(alias = "ncclDevComm")]
pub struct DevComm {
    state: Rc<CommState>,
}

impl DevComm {
    /// The device communicator as an argument for `rank`'s kernel.
    ///
    /// # Panics
    ///
    /// If there is no such rank, as indexing does. (In the closure of a launch that becomes an error.)
    pub fn rank(&self, rank: usize) -> DevCommArg<'_> {
        DevCommArg { comm: &self.state.comms[rank], state: &self.state, rank }
    }
}

/// A device communicator as one rank's kernel takes it.
#[derive(Clone, Copy)]
pub struct DevCommArg<'a> {
    comm: &'a nccl::DevComm,
    state: &'a CommState,
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
        let (asked, made) = &self.state.resources[key.index];
        assert!(*asked == key.request.into(), "the key is of another configuration");
        key.request.handle(made[self.rank.min(made.len() - 1)])
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

/// What lies behind a [`DevComm`].
pub(crate) struct CommState {
    comms: Box<[nccl::DevComm]>,
    /// What was asked for, and what was made: for each rank, or once for all.
    resources: Vec<(Resource, Vec<Made>)>,
    /// Whether a kernel that used it failed: its barriers stand anywhere.
    pub(crate) poisoned: Cell<bool>,
    #[expect(dead_code, reason = "owned: the communicators point into it")]
    gin: Option<Box<GinComm>>,
    #[expect(dead_code, reason = "owned: the communicators point into it")]
    window: Symmetric,
    #[expect(dead_code, reason = "owned: the multicast addresses that kernels have are in it")]
    groups: Vec<Groups>,
}

impl CommState {
    /// Whether a kernel's argument is one of these.
    pub(crate) fn has(&self, comm: &nccl::DevComm) -> bool {
        self.comms.iter().any(|c| c.resource_window == comm.resource_window)
    }
}

/// Multicast groups of all ranks; they end with this.
struct Groups {
    /// The base address of each rank's group.
    bases: Vec<usize>,
    memory: Rc<Memory>,
}

impl Groups {
    /// Teams of `n` ranks, `stride` apart: every run of `n * stride` ranks is cut into `stride` of them.
    fn new(ranks: &Ranks, n: usize, stride: usize) -> Result<Self> {
        let mut groups = Self { bases: Vec::new(), memory: Rc::clone(&ranks.memory) };
        for rank in 0..ranks.len() {
            let first = rank - rank % (n * stride) + rank % stride;
            if first < rank {
                groups.bases.push(groups.bases[first]);
                continue;
            }
            let group = Group { gpus: Rc::clone(&ranks.gpus), first, n, stride };
            match ranks.memory.multicast.add_group(group) {
                Some(base) => groups.bases.push(base),
                None => return Err(Error::Settings("too many multicast groups".to_owned())),
            }
        }
        Ok(groups)
    }

    fn handle(&self, rank: usize) -> MultimemHandle {
        MultimemHandle { base: std::ptr::without_provenance_mut(self.bases[rank]) }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        self.bases.sort_unstable();
        self.bases.dedup();
        self.bases.iter().for_each(|base| self.memory.multicast.remove_group(*base));
    }
}

/// What NCCL's device code divides by `n` with: 2^32 / n, which wraps to 0 for 1.
fn reciprocal(n: usize) -> u32 {
    let n = u32::try_from(n.max(1)).unwrap_or(u32::MAX);
    (u32::MAX / n).wrapping_add(n.is_power_of_two().into())
}

/// A device communicator in every one of these ranks.
pub(crate) fn make(of: &Ranks, config: &DevCommConfig, id: u32) -> Result<DevComm> {
    let (ranks, lsa_ranks) = (of.len(), of.lsa_ranks);
    let plan = Plan::new(config, ranks, lsa_ranks)?;
    let window = of.symmetric(plan.bytes, id, |rank| Owner::Resources { id, rank })?;
    (0..ranks).for_each(|rank| window.allocation.zero(rank));
    let mut groups = Vec::new();
    let mut lsa_multimem = None;
    if config.lsa_multimem {
        let lsa = Groups::new(of, lsa_ranks, 1)?;
        lsa_multimem = Some((0..ranks).map(|rank| lsa.handle(rank)).collect::<Vec<_>>());
        groups.push(lsa);
    }
    let mut resources = Vec::new();
    for (asked, made) in config.resources.iter().zip(&plan.made) {
        let made = match asked {
            Resource::Team(TeamMultimem { ranks: n, stride }) => {
                let team = Groups::new(of, *n as usize, *stride as usize)?;
                let handles = (0..ranks).map(|rank| Made { multimem: team.handle(rank), ..*made });
                let handles = handles.collect();
                groups.push(team);
                handles
            }
            _ => vec![*made],
        };
        resources.push((*asked, made));
    }
    let at = |rank: usize, handle: u32| {
        window.allocation.part(rank).wrapping_add(handle as usize * RESOURCE_UNIT)
    };
    let gin = plan.gin.as_ref().map(|gin: &GinPlan| {
        Box::new(GinComm {
            id,
            gpus: Rc::clone(&of.gpus),
            stride: gin.stride as usize,
            contexts: gin.contexts,
            signals: gin.signals,
            counters: gin.counters,
            strong: config.gin_strong_signals,
            depth: gin.depth,
            barriers: gin.barriers.clone(),
            network: Rc::clone(&of.network),
            of_rank: (0..ranks)
                .map(|rank| {
                    let counts = (gin.contexts * gin.signals, gin.contexts * gin.counters);
                    crate::nccl::GinRank::new(counts, at(rank, gin.shadows).cast())
                })
                .collect(),
        })
    });
    let comm = |rank: usize| {
        let view = &window.views[rank];
        let mut comm = nccl::DevComm {
            magic: MAGIC,
            version: VERSION,
            rank: rank as i32,
            n_ranks: ranks as i32,
            n_ranks_rcp32: reciprocal(ranks),
            lsa_rank: view.lsa_rank,
            lsa_size: view.lsa_size,
            lsa_size_rcp32: reciprocal(lsa_ranks),
            resource_window: window.handle(rank),
            resource_window_inlined: ResourceWindow {
                lsa_flat_base: view.flat_base.cast(),
                stride_4g: view.stride_4g,
                mc_offset_4k: view.mc_offset_4k,
            },
            lsa_multimem: lsa_multimem.as_ref().map_or(MultimemHandle::NULL, |bases| bases[rank]),
            lsa_barrier: plan.lsa_barrier,
            hybrid_lsa_barrier: plan.hybrid_lsa_barrier,
            ..nccl::DevComm::zeroed()
        };
        if let (Some(gin), Some(network)) = (&plan.gin, &gin) {
            comm.gin_connection_count = 1;
            comm.gin_net_device_types[0] = PROXY;
            comm.gin_handles[0] = std::ptr::from_ref(&**network).cast_mut().cast();
            comm.gin_signal_count = gin.signals;
            comm.gin_counter_count = gin.counters;
            comm.gin_signal_shadows = at(rank, gin.shadows).cast();
            comm.gin_context_count = gin.contexts;
            comm.gin_connection_stride = gin.stride;
            comm.gin_connection_stride_rcp32 = reciprocal(gin.stride as usize);
            comm.gin_context_stride = gin.stride;
            comm.gin_strong_legacy_signals = config.gin_strong_signals;
            comm.hybrid_rail_gin_barrier = plan.hybrid_rail_gin_barrier;
            comm.hybrid_dense_gin_barrier = plan.hybrid_dense_gin_barrier;
            comm.rail_gin_barrier = plan.rail_gin_barrier;
            comm.world_gin_barrier = plan.world_gin_barrier;
        }
        comm
    };
    let comms = (0..ranks).map(comm).collect();
    let poisoned = Cell::new(false);
    Ok(DevComm { state: Rc::new(CommState { comms, resources, poisoned, gin, window, groups }) })
}

impl DevComm {
    /// What the simulator keeps of it.
    pub(crate) fn state(&self) -> &Rc<CommState> {
        &self.state
    }
}
