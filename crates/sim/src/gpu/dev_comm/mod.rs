//! Creates device communicators: one `ncclDevComm` per rank, with its resources.

mod plan;

use std::rc::Rc;

use devcomm_sys::nccl::{ABI_VERSION, API_MAGIC};
use devcomm_types::nccl::{self, MultimemHandle, ResourceWindow};
use litemap::LiteMap;

pub(crate) use self::plan::{AllocatedResource, DevCommConfig, Resource};
use self::plan::{GinPlan, Plan};
use crate::base::error::{Error, Result};
use crate::base::layout::RESOURCE_UNIT;
use crate::base::owner::Owner;
use crate::gpu::nccl::GinComm;
use crate::gpu::ranks::{Ranks, Symmetric};
use crate::memory::Memory;
use crate::memory::multicast::MulticastGroup;

/// NCCL: `NCCL_NET_DEVICE_GIN_PROXY`.
const PROXY: u8 = 2;

/// The device communicators of all ranks, and the memory that they point to.
pub(crate) struct CommState {
    pub(crate) comms: Box<[nccl::DevComm]>,
    /// The resources allocated for each entry of the requirement list.
    pub(crate) resources: Vec<AllocatedResource>,
    /// Multicast groups of each requested team.
    pub(crate) teams: Vec<MulticastGroups>,
    #[expect(dead_code, reason = "owner: the device communicators point into it")]
    gin: Option<Box<GinComm>>,
    #[expect(dead_code, reason = "owner: the device communicators point into it")]
    window: Symmetric,
    #[expect(dead_code, reason = "owner: kernels have its multicast addresses")]
    lsa_team: Option<MulticastGroups>,
}

/// The multicast groups of one team for each rank, removed on drop.
pub(crate) struct MulticastGroups {
    /// The base address of each rank's group.
    bases: Vec<usize>,
    memory: Rc<Memory>,
}

impl MulticastGroups {
    /// Returns groups for teams of `n` ranks with stride `stride`; `first(rank)` is the first rank
    /// of `rank`'s team.
    fn new(ranks: &Ranks, n: usize, stride: usize, first: impl Fn(usize) -> usize) -> Result<Self> {
        let mut groups = Self { bases: Vec::new(), memory: Rc::clone(&ranks.memory) };
        let mut known = LiteMap::<_, _>::new();
        for rank in 0..ranks.len() {
            let (first, lsa) = (first(rank), rank - rank % ranks.lsa_ranks);
            let last = n.checked_sub(1).and_then(|n| n.checked_mul(stride)?.checked_add(first));
            let team_ranks = || (0..n).map(|i| first + i * stride);
            let within = last.is_some_and(|last| lsa <= first && last < lsa + ranks.lsa_ranks);
            if stride == 0 || !within || !team_ranks().any(|team_rank| team_rank == rank) {
                return Err(Error::Settings(format!(
                    "a team of {n} ranks with stride {stride} from rank {first}: rank {rank} is \
                    not in it, or it exceeds the LSA team"
                )));
            }
            let base = match known.get(&first) {
                Some(base) => *base,
                None => {
                    let group = MulticastGroup { gpus: Rc::clone(&ranks.gpus), first, n, stride };
                    let base = ranks.memory.multicast.add_group(group);
                    let too_many = || Error::Settings("too many multicast groups".to_owned());
                    *known.entry(first).or_insert(base.ok_or_else(too_many)?)
                }
            };
            groups.bases.push(base);
        }
        Ok(groups)
    }

    /// Returns groups for the LSA teams.
    pub(crate) fn of_lsa_teams(ranks: &Ranks) -> Result<Self> {
        Self::new(ranks, ranks.lsa_ranks, 1, |rank| rank - rank % ranks.lsa_ranks)
    }

    pub(crate) fn handle(&self, rank: usize) -> MultimemHandle {
        MultimemHandle { base: std::ptr::without_provenance_mut(self.bases[rank]) }
    }
}

impl Drop for MulticastGroups {
    fn drop(&mut self) {
        self.bases.sort_unstable();
        self.bases.dedup();
        self.bases.iter().for_each(|base| self.memory.multicast.remove_group(*base));
    }
}

/// Returns the reciprocal with which NCCL's device code divides by `n`: 2^32 / n, which wraps to 0
/// for 1.
fn reciprocal(n: usize) -> u32 {
    let n = u32::try_from(n.max(1)).unwrap_or(u32::MAX);
    (u32::MAX / n).wrapping_add(n.is_power_of_two().into())
}

/// Returns the simulated network's state of a device communicator.
fn gin_comm(
    ranks: &Ranks,
    config: &DevCommConfig,
    gin: &GinPlan,
    id: u32,
    per_rank: Box<[crate::gpu::nccl::GinRank]>,
) -> GinComm {
    GinComm {
        id,
        gpus: Rc::clone(&ranks.gpus),
        stride: gin.stride as usize,
        contexts: gin.contexts,
        signals: gin.signals,
        counters: gin.counters,
        strong: config.gin_strong_signals,
        depth: gin.depth,
        barriers: gin.barriers.clone(),
        network: Rc::clone(&ranks.network),
        per_rank,
    }
}

/// Creates a device communicator on all ranks. `first(team, rank)` is the first rank of `rank`'s
/// team, for each of `config.teams`.
pub(crate) fn make(
    ranks: &Ranks,
    config: &DevCommConfig,
    id: u32,
    first: impl Fn(usize, usize) -> usize,
) -> Result<CommState> {
    let (n_ranks, lsa_ranks) = (ranks.len(), ranks.lsa_ranks);
    let plan = Plan::new(config, n_ranks, lsa_ranks)?;
    let window = ranks.symmetric(plan.bytes, id, |rank| Owner::Resources { id, rank })?;
    (0..n_ranks).for_each(|rank| window.allocation.zero(rank));
    let lsa_team = config.lsa_multimem.then(|| MulticastGroups::of_lsa_teams(ranks)).transpose()?;
    let team = |(team, (n, stride)): (usize, &(u32, u32))| {
        MulticastGroups::new(ranks, *n as usize, *stride as usize, |rank| first(team, rank))
    };
    let teams = config.teams.iter().enumerate().map(team).collect::<Result<Vec<_>>>()?;
    let at = |rank: usize, handle: u32| {
        window.allocation.part(rank).wrapping_add(handle as usize * RESOURCE_UNIT)
    };
    let gin = plan.gin.as_ref().map(|gin: &GinPlan| {
        let counts = (gin.contexts * gin.signals, gin.contexts * gin.counters);
        let of_rank = |rank| crate::gpu::nccl::GinRank::new(counts, at(rank, gin.shadows).cast());
        let per_rank = (0..n_ranks).map(of_rank).collect();
        Box::new(gin_comm(ranks, config, gin, id, per_rank))
    });
    let comm = |rank: usize| {
        let view = &window.views[rank];
        let mut comm = nccl::DevComm {
            magic: API_MAGIC,
            version: ABI_VERSION,
            rank: rank as i32,
            n_ranks: n_ranks as i32,
            n_ranks_rcp32: reciprocal(n_ranks),
            lsa_rank: view.lsa_rank,
            lsa_size: view.lsa_size,
            lsa_size_rcp32: reciprocal(lsa_ranks),
            resource_window: window.handle(rank),
            resource_window_inlined: ResourceWindow {
                lsa_flat_base: view.flat_base.cast(),
                stride_4g: view.stride_4g,
                mc_offset_4k: view.mc_offset_4k,
            },
            lsa_multimem: lsa_team.as_ref().map_or(MultimemHandle::NULL, |team| team.handle(rank)),
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
            let connected = if config.has_rails_only { lsa_ranks } else { 1 };
            comm.gin_connection_stride = connected as u32;
            comm.gin_connection_stride_rcp32 = reciprocal(connected);
            comm.gin_context_stride = gin.stride;
            comm.gin_strong_legacy_signals = config.gin_strong_signals;
            comm.hybrid_rail_gin_barrier = plan.hybrid_rail_gin_barrier;
            comm.hybrid_dense_gin_barrier = plan.hybrid_dense_gin_barrier;
            comm.rail_gin_barrier = plan.rail_gin_barrier;
            comm.world_gin_barrier = plan.world_gin_barrier;
        }
        comm
    };
    let comms = (0..n_ranks).map(comm).collect();
    Ok(CommState { comms, resources: plan.resources, teams, gin, window, lsa_team })
}
