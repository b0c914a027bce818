//! NCCL's host functions for device communicators and their requirements.

use std::ffi::c_int;
use std::rc::Rc;

use devcomm_sys::nccl::{
    ABI_VERSION, API_MAGIC, RawComm, Requirements, ResourceRequirements, SUCCESS,
};
use devcomm_types::nccl::{
    GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle, ResourceHandle,
};
use devcomm_types::{DevComm, GinConnectionType, GinType, Team};

use super::call::{CallContext, CallProgress, NcclError, NcclResult, call};
use super::comm::Comm;
use super::config::list;
use super::rendezvous::{Task, TaskKind};
use crate::gpu::dev_comm::{CommState, DevCommConfig, Resource, make};
use crate::gpu::nccl::barrier_words;
use crate::machine::core::Core;

/// One rank's `ncclDevCommCreate`.
pub(super) struct Creation {
    config: DevCommConfig,
    /// Each requested team, as seen by the rank.
    teams: Vec<Team>,
    out: *mut DevComm,
    /// Where to write the buffer, first signal and first counter of each resource; may be NULL.
    out_resources: Vec<(*mut ResourceHandle, *mut u32, *mut u32)>,
    out_teams: Vec<*mut MultimemHandle>,
}

/// One rank's device communicator. Its key is the handle of its resource window.
pub(super) struct RankDevComm {
    comm: Rc<Comm>,
    rank: usize,
    #[expect(dead_code, reason = "owner: kernels have pointers into it")]
    state: Rc<CommState>,
}

impl RankDevComm {
    pub(super) fn is_of(&self, comm: &Rc<Comm>, rank: usize) -> bool {
        Rc::ptr_eq(&self.comm, comm) && self.rank == rank
    }
}

/// Creates the device communicator once all ranks have called.
pub(super) fn complete(core: &Core, tasks: &[(&Task, &Creation)]) -> NcclResult<()> {
    let Some((first, own)) = tasks.first() else { return Ok(()) };
    let comm = first.rank_comm.joined()?.0;
    if let Some((other, theirs)) = tasks.iter().find(|(_, theirs)| theirs.config != own.config) {
        let (a, b) = (first.rank_comm.name(), other.rank_comm.name());
        let text = format!("{a} asks for {:?}, but {b} for {:?}", own.config, theirs.config);
        return Err(NcclError::usage(text));
    }
    let first_rank = |team: usize, rank: usize| {
        let first = tasks[rank].1.teams[team].to_world(rank as i32, 0);
        // For a negative rank this is one that `make` refuses, since no team has it.
        usize::try_from(first).unwrap_or(usize::MAX)
    };
    let state = make(&comm.ranks, &own.config, core.nccl.next_id(), first_rank);
    let state = Rc::new(state.map_err(|error| NcclError::argument(error.to_string()))?);
    for (rank, (_, creation)) in tasks.iter().enumerate() {
        // SAFETY: the program keeps the output pointers valid until the call has completed, as NCCL
        // requires; NULL ones are not written.
        unsafe {
            for ((buffer, signal, counter), resource) in
                creation.out_resources.iter().zip(&state.resources)
            {
                write(*buffer, resource.buffer);
                write(*signal, resource.first_signal);
                write(*counter, resource.first_counter);
            }
            for (out, team) in creation.out_teams.iter().zip(&state.teams) {
                write(*out, team.handle(rank));
            }
            creation.out.write(state.comms[rank]);
        }
        let (comm, state) = (Rc::clone(comm), Rc::clone(&state));
        let handle = state.comms[rank].resource_window.addr();
        core.nccl.dev_comms.borrow_mut().insert(handle, RankDevComm { comm, rank, state });
    }
    Ok(())
}

/// Writes a value, unless `out` is NULL.
///
/// # Safety
///
/// `out` is NULL or valid for a write.
unsafe fn write<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller passes a valid out pointer.
        unsafe { out.write(value) };
    }
}

fn count(value: c_int, what: &str) -> NcclResult<u32> {
    u32::try_from(value).map_err(|_| NcclError::argument(format!("{value} {what}")))
}

/// Returns the GIN connection that requirements ask for; refuses what simulated GPUs lack.
fn connection_of(
    cx: &CallContext<'_>,
    raw: &Requirements,
    needs_multicast: bool,
) -> NcclResult<GinConnectionType> {
    use GinConnectionType as N;
    let simulation = cx.core.simulation();
    let lacks = |what: &str| Err(NcclError::usage(format!("simulated GPUs have no {what}")));
    if needs_multicast && !simulation.multimem {
        return lacks("multicast");
    }
    if raw.cft_caps != 0 || raw.cft_barrier_count != 0 {
        return lacks("CFT");
    }
    let gin_type = GinType::from_raw(raw.gin_type);
    if !matches!(gin_type, GinType::None | GinType::Proxy) {
        return lacks("GIN back end but PROXY");
    }
    let gin_connection = match GinConnectionType::from_raw(raw.gin_connection_type) {
        GinConnectionType::None if raw.gin_force_enable => GinConnectionType::Full,
        connection => connection,
    };
    let network = simulation.network;
    if gin_connection != N::None && ![N::Full, gin_connection].contains(&network) {
        let text =
            format!("a GIN connection of type {gin_connection}, but the network is {network}");
        return Err(NcclError::argument(text));
    }
    Ok(gin_connection)
}

impl Creation {
    /// Reads a rank's requirements.
    ///
    /// # Safety
    ///
    /// The lists are NULL-terminated.
    unsafe fn read(
        cx: &CallContext<'_>,
        raw: &Requirements,
        out: *mut DevComm,
    ) -> NcclResult<Self> {
        // SAFETY: the caller passes requirements whose lists are valid.
        let resources = unsafe { list(raw.resource_requirements_list, |node| node.next) };
        // SAFETY: the caller passes requirements whose lists are valid.
        let teams = unsafe { list(raw.team_requirements_list, |node| node.next) };
        let multimem = teams.iter().filter(|team| team.multimem);
        let needs_multicast = raw.lsa_multimem || multimem.clone().next().is_some();
        let gin_connection = connection_of(cx, raw, needs_multicast)?;
        let resource = |node: &ResourceRequirements| {
            Ok(Resource {
                bytes: node.buffer_size,
                align: node.buffer_align.max(1),
                signals: count(node.gin_signal_count, "signals")?,
                counters: count(node.gin_counter_count, "counters")?,
            })
        };
        let mut config = DevCommConfig {
            lsa_barriers: count(raw.lsa_barrier_count, "LSA barriers")?,
            lsa_multimem: raw.lsa_multimem,
            barriers: count(raw.barrier_count, "barriers")?,
            rail_gin_barriers: count(raw.rail_gin_barrier_count, "rail GIN barriers")?,
            world_gin_barriers: count(raw.world_gin_barrier_count, "world GIN barriers")?,
            gin_connection,
            has_rails_only: cx.core.simulation().network == GinConnectionType::Rail,
            gin_custom_stride: count(raw.gin_custom_stride, "as custom stride")?,
            gin_contexts: count(raw.gin_context_count, "GIN contexts")?,
            gin_signals: count(raw.gin_signal_count, "signals")?,
            gin_counters: count(raw.gin_counter_count, "counters")?,
            gin_strong_signals: raw.gin_strong_signals_required,
            gin_queue_depth: count(raw.gin_queue_depth, "as queue depth")?,
            resources: resources.iter().map(resource).collect::<NcclResult<_>>()?,
            teams: Vec::new(),
        };
        for node in multimem.clone() {
            let (n, stride) = (node.team.n_ranks, node.team.stride);
            config.teams.push((count(n, "ranks of a team")?, count(stride, "as stride")?));
        }
        let blocks = count(raw.lsa_ll_a2a_block_count, "LL all-to-all blocks")?;
        let slots = count(raw.lsa_ll_a2a_slot_count, "LL all-to-all slots")?;
        if blocks > 0 {
            let bytes = ll_a2a_bytes(blocks as usize, slots as usize);
            config.resources.push(Resource { bytes, align: 16, ..Resource::default() });
        }
        let outs = |node: &ResourceRequirements| {
            (node.out_buffer_handle, node.out_gin_signal_start, node.out_gin_counter_start)
        };
        Ok(Self {
            config,
            teams: multimem.clone().map(|node| node.team).collect(),
            out,
            out_resources: resources.iter().map(outs).collect(),
            out_teams: multimem.map(|node| node.out_multimem_handle).collect(),
        })
    }
}

pub(super) unsafe extern "C" fn create(
    comm: RawComm,
    requirements: *const Requirements,
    out: *mut DevComm,
) -> c_int {
    const NAME: &str = "ncclDevCommCreate";
    call(NAME, comm, |cx| {
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let raw = unsafe { &*requirements };
        cx.note(|| {
            let barriers = format!("{} barriers", raw.lsa_barrier_count);
            // SAFETY: the program passes valid pointers, as NCCL requires.
            let resources = unsafe { list(raw.resource_requirements_list, |node| node.next) }.len();
            // SAFETY: the program passes valid pointers, as NCCL requires.
            let teams = unsafe { list(raw.team_requirements_list, |node| node.next) }.len();
            match resources + teams {
                0 => barriers,
                _ => format!("{barriers} {resources} resources {teams} teams"),
            }
        });
        let rank_comm = cx.live(comm)?;
        let (size, version) = (size_of::<Requirements>(), ABI_VERSION);
        if (raw.size, raw.magic, raw.version) != (size, API_MAGIC, version) {
            let text = "requirements of another version than 2.32.3, or not initialized";
            return Err(NcclError::usage(text));
        }
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let kind = TaskKind::DevComm(unsafe { Creation::read(cx, raw, out) }?);
        cx.start(Task::new(NAME, rank_comm, None, kind))
    })
}

/// Destroys the calling rank's device communicator only.
pub(super) unsafe extern "C" fn destroy(comm: RawComm, dev_comm: *const DevComm) -> c_int {
    const NAME: &str = "ncclDevCommDestroy";
    call(NAME, comm, |cx| {
        let rank_comm = cx.rank_comm(comm)?;
        let (shared, rank) = rank_comm.joined()?;
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let dev_comm = unsafe { &*dev_comm };
        let handle = dev_comm.resource_window.addr();
        let mut all = cx.core.nccl.dev_comms.borrow_mut();
        let is_own = all.get(&handle).is_some_and(|found| found.is_of(shared, rank));
        // NCCL would treat an abort flag that the program set in its copy as NCCL's own.
        if !is_own || dev_comm.magic != API_MAGIC || !dev_comm.abort_flag.is_null() {
            let text = "not an unmodified device communicator of this communicator";
            return Err(NcclError::argument(text));
        }
        let destroyed = all.remove(&handle);
        drop(all);
        let gpu = shared.ranks.gpus[rank] as usize;
        let what = || format!("a device communicator of rank {rank}");
        cx.core.check_unused(NAME, what, gpu, |word| word == handle)?;
        cx.core.defer_drop(destroyed);
        Ok(CallProgress::Done(SUCCESS))
    })
}

pub(super) unsafe extern "C" fn lsa_barriers(
    team: Team,
    n_barriers: c_int,
    handle: *mut LsaBarrierHandle,
    out: *mut ResourceRequirements,
) -> c_int {
    let n = usize::try_from(n_barriers).unwrap_or(0);
    let ranks = usize::try_from(team.n_ranks).unwrap_or(0);
    let buffer_size = barrier_words(n, ranks).saturating_mul(size_of::<u32>());
    // SAFETY: the program passes valid pointers, as NCCL requires.
    unsafe {
        (*handle).n_barriers = n_barriers;
        let out_buffer_handle = &raw mut (*handle).buffer;
        let buffer =
            ResourceRequirements { buffer_size, buffer_align: 4, ..ResourceRequirements::NONE };
        out.write(ResourceRequirements { out_buffer_handle, ..buffer });
    }
    SUCCESS
}

pub(super) unsafe extern "C" fn gin_barriers(
    _comm: RawComm,
    team: Team,
    n_barriers: c_int,
    handle: *mut GinBarrierHandle,
    out: *mut ResourceRequirements,
) -> c_int {
    let gin_signal_count = n_barriers.saturating_mul(team.n_ranks);
    // SAFETY: the program passes valid pointers, as NCCL requires.
    unsafe {
        let out_gin_signal_start = &raw mut (*handle).signal0;
        out.write(ResourceRequirements {
            gin_signal_count,
            out_gin_signal_start,
            ..ResourceRequirements::NONE
        });
    }
    SUCCESS
}

pub(super) unsafe extern "C" fn ll_a2a_slots(max_elements: c_int, max_size: c_int) -> c_int {
    let words = c_int::try_from(max_size.max(0).unsigned_abs().div_ceil(8)).unwrap_or(c_int::MAX);
    max_elements.saturating_mul(words)
}

/// Returns the bytes of an LL all-to-all: a header and two banks of slots per block, 16 bytes each.
/// `ncclDevCommCreate` refuses numbers that are too large.
fn ll_a2a_bytes(blocks: usize, slots: usize) -> usize {
    blocks.saturating_mul(1 + 2 * slots).saturating_mul(16)
}

pub(super) unsafe extern "C" fn ll_a2a(
    n_blocks: c_int,
    n_slots: c_int,
    handle: *mut LlA2aHandle,
    out: *mut ResourceRequirements,
) -> c_int {
    let positive = |value: c_int| usize::try_from(value).unwrap_or(0);
    let buffer_size = ll_a2a_bytes(positive(n_blocks), positive(n_slots));
    // SAFETY: the program passes valid pointers, as NCCL requires.
    unsafe {
        (*handle).n_slots = n_slots.max(0).unsigned_abs();
        let out_buffer_handle = &raw mut (*handle).buffer;
        let buffer =
            ResourceRequirements { buffer_size, buffer_align: 16, ..ResourceRequirements::NONE };
        out.write(ResourceRequirements { out_buffer_handle, ..buffer });
    }
    SUCCESS
}
