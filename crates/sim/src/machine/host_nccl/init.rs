//! Creates communicators from unique ids.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use devcomm_sys::nccl::{Config, RawComm, RawUniqueId, SUCCESS};

use super::call::{CallProgress, NcclError, NcclResult, call, call_ungrouped};
use super::comm::{Comm, RankComm};
use super::config::Settings;
use super::rendezvous::{Task, TaskKind};

/// Prefix of the unique ids of simulated machines.
const PREFIX: [u8; 8] = *b"devcomm.";

/// Returns a unique id, unique among all machines of this process.
pub(super) fn new_id() -> (u64, RawUniqueId) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&PREFIX);
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    (number, RawUniqueId(bytes))
}

/// Decodes the number in a unique id.
pub(super) fn number_of(id: &RawUniqueId) -> NcclResult<u64> {
    let (prefix, rest) = id.0.split_at(8);
    let number = rest.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let known = number.filter(|number| prefix == PREFIX && *number > 0);
    known.ok_or_else(|| NcclError::argument("the unique id was not created by a simulated machine"))
}

pub(super) unsafe extern "C" fn get_unique_id(id: *mut RawUniqueId) -> c_int {
    call_ungrouped("ncclGetUniqueId", null_mut(), |_| {
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { id.write(new_id().1) };
        Ok(())
    })
}

/// Checks a rank number and a rank count.
pub(super) fn rank_of(rank: c_int, n_ranks: c_int) -> NcclResult<(usize, usize)> {
    let numbers = usize::try_from(rank).ok().zip(usize::try_from(n_ranks).ok());
    let valid = numbers.filter(|(rank, n_ranks)| rank < n_ranks);
    valid.ok_or_else(|| NcclError::argument(format!("invalid rank {rank} of {n_ranks} ranks")))
}

/// Begins the creation of a communicator by unique ids.
///
/// # Safety
///
/// The contract is that of NCCL's function.
unsafe fn init(
    name: &'static str,
    out: *mut RawComm,
    n_ranks: c_int,
    rank: c_int,
    ids: (*const RawUniqueId, c_int),
    config: *const Config,
) -> c_int {
    call(name, null_mut(), |cx| {
        cx.note(|| {
            let id_count = if ids.1 > 1 { format!(" ids {}", ids.1) } else { String::new() };
            // SAFETY: the program passes valid pointers, as NCCL requires.
            format!("{rank} of {n_ranks}{id_count}{}", unsafe { Settings::describe(config) })
        });
        let (rank, n_ranks) = rank_of(rank, n_ranks)?;
        if ids.1 < 1 {
            return Err(NcclError::argument("no unique id"));
        }
        // All ranks pass the same ids: the first one identifies the rendezvous.
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let id = number_of(unsafe { &*ids.0 })?;
        // SAFETY: the program passes valid pointers, as NCCL requires.
        let settings = unsafe { Settings::read(config, Settings::default()) }?;
        let rank_comm = RankComm::new(cx.core, cx.gpu()?, settings);
        // SAFETY: the program passes valid pointers, as NCCL requires.
        unsafe { cx.write_handle(out, &rank_comm) };
        let created = Some((Rc::clone(&rank_comm), out));
        cx.start(Task::new(name, rank_comm, created, TaskKind::Join { id, rank, n_ranks }))
    })
}

impl super::call::CallContext<'_> {
    /// Writes a new communicator's handle.
    ///
    /// # Safety
    ///
    /// `out` is valid for a write.
    pub(super) unsafe fn write_handle(&self, out: *mut RawComm, rank_comm: &RankComm) {
        let raw = if self.injects_null() { null_mut() } else { rank_comm.raw() };
        // SAFETY: the caller passes a valid out pointer.
        unsafe { out.write(raw) };
    }
}

pub(super) unsafe extern "C" fn init_rank(
    out: *mut RawComm,
    n_ranks: c_int,
    id: RawUniqueId,
    rank: c_int,
) -> c_int {
    let none = std::ptr::null();
    // SAFETY: the program passes valid pointers, as NCCL requires; the id is live for the call.
    unsafe { init("ncclCommInitRank", out, n_ranks, rank, (&raw const id, 1), none) }
}

pub(super) unsafe extern "C" fn init_rank_config(
    out: *mut RawComm,
    n_ranks: c_int,
    id: RawUniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    // SAFETY: the program passes valid pointers, as NCCL requires.
    unsafe { init("ncclCommInitRankConfig", out, n_ranks, rank, (&raw const id, 1), config) }
}

pub(super) unsafe extern "C" fn init_rank_scalable(
    out: *mut RawComm,
    n_ranks: c_int,
    rank: c_int,
    n_ids: c_int,
    ids: *mut RawUniqueId,
    config: *mut Config,
) -> c_int {
    // SAFETY: the program passes valid pointers, as NCCL requires.
    unsafe { init("ncclCommInitRankScalable", out, n_ranks, rank, (ids, n_ids), config) }
}

/// Creates the communicators of all ranks on the calling thread.
pub(super) unsafe extern "C" fn init_all(
    out: *mut RawComm,
    n_devices: c_int,
    devices: *const c_int,
) -> c_int {
    call("ncclCommInitAll", null_mut(), |cx| {
        cx.note(|| n_devices.to_string());
        let n = usize::try_from(n_devices).unwrap_or(0);
        if n == 0 {
            return Err(NcclError::argument(format!("{n_devices} is not a number of GPUs")));
        }
        let mut gpus = Vec::with_capacity(n);
        for index in 0..n {
            // SAFETY: the program passes NULL, which selects the first GPUs, or a list of `n`.
            let device = unsafe { devices.as_ref().map(|_| *devices.add(index)) };
            let gpu = device.map_or(Some(index), |device| usize::try_from(device).ok());
            let gpu = gpu.filter(|gpu| *gpu < cx.core.devices.len());
            gpus.push(gpu.ok_or_else(|| NcclError::argument(format!("no GPU {device:?}")))?);
        }
        if let Some(twice) = (1..n).find(|index| gpus[..*index].contains(&gpus[*index])) {
            return Err(NcclError::argument(format!("GPU {} is listed twice", gpus[twice])));
        }
        let rank_comm = |gpu: &usize| RankComm::new(cx.core, *gpu, Settings::default());
        let rank_comms: Vec<_> = gpus.iter().map(rank_comm).collect();
        for (index, rank_comm) in rank_comms.iter().enumerate() {
            // SAFETY: the program passes valid pointers, as NCCL requires.
            unsafe { cx.write_handle(out.add(index), rank_comm) };
        }
        Comm::make(cx.core, rank_comms);
        Ok(CallProgress::Done(SUCCESS))
    })
}
