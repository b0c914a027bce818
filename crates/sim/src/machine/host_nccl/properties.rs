//! Queries: version, error strings, and a communicator's properties.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;

use devcomm_sys::nccl::{ABI_VERSION, API_MAGIC, CommProperties, EncryptionConfig, RawComm};
use devcomm_types::{DevComm, GinConnectionType, GinType};

use super::call::{NcclError, call_ungrouped};

pub(super) unsafe extern "C" fn version(version: *mut c_int) -> c_int {
    // SAFETY: the program passes a valid out pointer, as NCCL requires.
    unsafe { version.write(ABI_VERSION.cast_signed()) };
    0
}

pub(super) unsafe extern "C" fn error_string(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        8 => c"timeout",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Does nothing: there is no log.
pub(super) unsafe extern "C" fn reset_debug_init() {}

/// Checks its arguments only: the simulator has no connections to encrypt.
pub(super) unsafe extern "C" fn set_encryption(config: *const EncryptionConfig) -> c_int {
    call_ungrouped("ncclSetEncryption", null_mut(), |cx| {
        // SAFETY: the program passes a valid configuration, as NCCL requires.
        let config = unsafe { &*config };
        cx.note(|| format!("mode {}", config.mode));
        if config.size != size_of::<EncryptionConfig>() || config.magic != API_MAGIC {
            return Err(NcclError::argument("the configuration was not initialized"));
        }
        match (config.mode, config.psk.is_null()) {
            (0, _) | (1, false) => Ok(()),
            (mode, _) => Err(NcclError::argument(format!("encryption of mode {mode}"))),
        }
    })
}

pub(super) unsafe extern "C" fn count(comm: RawComm, count: *mut c_int) -> c_int {
    call_ungrouped("ncclCommCount", comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { count.write(rank_comm.joined()?.0.n_ranks() as c_int) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn user_rank(comm: RawComm, rank: *mut c_int) -> c_int {
    call_ungrouped("ncclCommUserRank", comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { rank.write(rank_comm.joined()?.1 as c_int) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn cu_device(comm: RawComm, device: *mut c_int) -> c_int {
    call_ungrouped("ncclCommCuDevice", comm, |cx| {
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { device.write(cx.ready(comm)?.gpu as c_int) };
        Ok(())
    })
}

/// Returns whether the communicator is suspended, or a size, which is 0: the simulator allocates no
/// NCCL buffers.
pub(super) unsafe extern "C" fn mem_stats(comm: RawComm, stat: c_int, value: *mut u64) -> c_int {
    const SUSPENDED: c_int = 1;
    call_ungrouped("ncclCommMemStats", comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        let is_suspended = u64::from(rank_comm.is_suspended.get());
        let number = match stat {
            SUSPENDED => is_suspended,
            0 | 2 | 3 => 0,
            _ => return Err(NcclError::argument(format!("no statistic has number {stat}"))),
        };
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { value.write(number) };
        Ok(())
    })
}

/// Reports PROXY as the GIN back end.
pub(super) unsafe extern "C" fn query(comm: RawComm, props: *mut CommProperties) -> c_int {
    call_ungrouped("ncclCommQueryProperties", comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        let (shared, rank) = rank_comm.joined()?;
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        let props = unsafe { &mut *props };
        let own = CommProperties::new();
        if (props.size, props.magic, props.version) != (own.size, own.magic, own.version) {
            return Err(NcclError::usage("properties of another version, or not initialized"));
        }
        let (network, is_one_team) =
            (cx.core.simulation().network, shared.n_ranks() == shared.lsa_size());
        let proxy = |is_available: bool| if is_available { GinType::Proxy } else { GinType::None };
        let is_connected = network != GinConnectionType::None;
        let mut gin_support = [0; 64];
        gin_support[GinType::Proxy.raw() as usize] = is_connected.into();
        let reaches_all = is_one_team || is_connected;
        *props = CommProperties {
            rank: rank as c_int,
            n_ranks: shared.n_ranks() as c_int,
            cuda_dev: rank_comm.gpu as c_int,
            nvml_dev: rank_comm.gpu as c_int,
            device_api_support: reaches_all.into(),
            multimem_support: cx.core.simulation().multimem.into(),
            gin_type: proxy(network == GinConnectionType::Full).raw(),
            n_lsa_teams: (shared.n_ranks() / shared.lsa_size()) as c_int,
            host_rma_support: (rank_comm.settings.rma_contexts > 0 && reaches_all).into(),
            railed_gin_type: proxy(is_connected).raw(),
            comm_hash: shared.number,
            gin_min_stride: match network {
                GinConnectionType::Full => 1,
                _ => shared.lsa_size() as c_int,
            },
            gin_connection_type: network.raw(),
            gin_support,
            dev_comm_runtime_version_size: size_of::<DevComm>(),
            ..own
        };
        Ok(())
    })
}
