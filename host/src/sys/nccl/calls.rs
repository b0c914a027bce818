//! Every call of NCCL that takes a communicator, as a [`Call`]. Arguments are checked by who makes
//! them; addresses of device memory, windows and streams are numbers here.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use devcomm_types::DevComm;

use super::DEV_COMM_VERSION;
use super::call::{Call, CommPtr, Out};
use super::lists::RequirementLists;
use super::lists_config::{LoweredCollectiveConfig, LoweredConfig};
use crate::error::Result;
use devcomm_sys::nccl::{
    CommProperties, IN_PROGRESS, RawComm, RawStream, RawUniqueId, RawWaitSignal, RawWindow,
};

/// What a collective works on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub send: u64,
    pub recv: u64,
    /// In elements, counted as the operation counts.
    pub count: usize,
    pub data_type: c_int,
    pub stream: u64,
}

fn stream(address: u64) -> RawStream {
    address as RawStream
}

fn window(address: u64) -> RawWindow {
    address as RawWindow
}

/// Wraps one function into a [`Call`].
macro_rules! call {
    ($symbol:literal, |$nccl:ident| $body:expr) => {
        // SAFETY: the body passes what `Call::make` asks to be live, and result cells that it owns.
        unsafe { Call::new($symbol, move |$nccl| $body) }
    };
}

macro_rules! collectives {
    ($( $name:ident, $with_config:ident, $symbol:literal, ($($extra:ident),*); )*) => { $(
        pub(crate) fn $name(
            comm: CommPtr,
            on: Operands,
            $($extra: c_int,)*
            config: Option<Arc<LoweredCollectiveConfig>>,
        ) -> Call {
            call!($symbol, |nccl| {
                let comm = comm;
                let (send, recv) = (on.send as *const c_void, on.recv as *mut c_void);
                let (count, data_type, stream) = (on.count, on.data_type, stream(on.stream));
                match &config {
                    None => nccl.$name(send, recv, count, data_type, $($extra,)* comm.0, stream),
                    Some(config) => nccl.$with_config(
                        send, recv, count, data_type, $($extra,)* comm.0, stream, config.as_ptr(),
                    ),
                }
            })
        }
    )* };
}

collectives! {
    all_reduce, all_reduce_config, "ncclAllReduce", (op);
    broadcast, broadcast_config, "ncclBroadcast", (root);
    reduce, reduce_config, "ncclReduce", (op, root);
    all_gather, all_gather_config, "ncclAllGather", ();
    reduce_scatter, reduce_scatter_config, "ncclReduceScatter", (op);
    all_to_all, all_to_all_config, "ncclAlltoAll", ();
    gather, gather_config, "ncclGather", (root);
    scatter, scatter_config, "ncclScatter", (root);
}

pub(crate) fn send(comm: CommPtr, on: Operands, peer: c_int) -> Call {
    call!("ncclSend", |nccl| {
        let comm = comm;
        let from = on.send as *const c_void;
        nccl.send(from, on.count, on.data_type, peer, comm.0, stream(on.stream))
    })
}

pub(crate) fn recv(comm: CommPtr, on: Operands, peer: c_int) -> Call {
    call!("ncclRecv", |nccl| {
        let comm = comm;
        let to = on.recv as *mut c_void;
        nccl.recv(to, on.count, on.data_type, peer, comm.0, stream(on.stream))
    })
}

/// Where a signal goes: peer, signal index, context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub peer: c_int,
    pub signal: c_int,
    pub context: c_int,
}

/// `offset` is in bytes of the peer's window.
pub(crate) fn put_signal(
    comm: CommPtr,
    on: Operands,
    to: Target,
    peer_window: u64,
    offset: usize,
) -> Call {
    call!("ncclPutSignal", |nccl| {
        let (comm, flags) = (comm, 0);
        nccl.put_signal(
            on.send as *const c_void,
            on.count,
            on.data_type,
            to.peer,
            window(peer_window),
            offset,
            to.signal,
            to.context,
            flags,
            comm.0,
            stream(on.stream),
        )
    })
}

pub(crate) fn signal(comm: CommPtr, to: Target, on: u64) -> Call {
    call!("ncclSignal", |nccl| {
        let comm = comm;
        let flags: c_uint = 0;
        nccl.signal(to.peer, to.signal, to.context, flags, comm.0, stream(on))
    })
}

pub(crate) fn wait_signal(comm: CommPtr, mut waits: Vec<RawWaitSignal>, on: u64) -> Call {
    call!("ncclWaitSignal", |nccl| {
        let comm = comm;
        let n = waits.len() as c_int;
        nccl.wait_signal(n, waits.as_mut_ptr(), comm.0, stream(on))
    })
}

/// A call that goes on in the background may still read its configuration: that is then never
/// freed.
fn read(code: c_int, config: LoweredConfig) -> Result<c_int> {
    if code == IN_PROGRESS {
        std::mem::forget(config);
    }
    Ok(code)
}

/// Joins a communicator. The calling thread's CUDA context is the rank's device.
pub(crate) fn init_rank(
    out: Out<RawComm>,
    mut ids: Vec<RawUniqueId>,
    rank: c_int,
    n_ranks: c_int,
    config: LoweredConfig,
) -> Call {
    call!("ncclCommInitRankScalable", |nccl| {
        let n_ids = ids.len() as c_int;
        let mut owned = config;
        let config = owned.as_mut_ptr();
        let (out, ids) = (out.as_ptr(), ids.as_mut_ptr());
        read(nccl.comm_init_rank_scalable(out, n_ranks, rank, n_ids, ids, config)?, owned)
    })
}

/// Communicators of all `devices`, to `outs` in order.
pub(crate) fn init_all(outs: Vec<Out<RawComm>>, devices: Vec<c_int>) -> Call {
    call!("ncclCommInitAll", |nccl| {
        let mut raw: Vec<RawComm> = vec![null_mut(); outs.len()];
        let n = devices.len() as c_int;
        let code = nccl.comm_init_all(raw.as_mut_ptr(), n, devices.as_ptr())?;
        for (out, raw) in outs.iter().zip(raw) {
            out.as_ptr().write(raw);
        }
        Ok(code)
    })
}

/// `color` -1 is no color.
pub(crate) fn split(
    comm: CommPtr,
    color: c_int,
    key: c_int,
    out: Out<RawComm>,
    config: LoweredConfig,
) -> Call {
    call!("ncclCommSplit", |nccl| {
        let comm = comm;
        let mut config = config;
        read(nccl.comm_split(comm.0, color, key, out.as_ptr(), config.as_mut_ptr())?, config)
    })
}

pub(crate) fn shrink(
    comm: CommPtr,
    mut exclude: Vec<c_int>,
    out: Out<RawComm>,
    config: LoweredConfig,
    flags: c_int,
) -> Call {
    call!("ncclCommShrink", |nccl| {
        let comm = comm;
        let n = exclude.len() as c_int;
        let (out, exclude, mut config) = (out.as_ptr(), exclude.as_mut_ptr(), config);
        read(nccl.comm_shrink(comm.0, exclude, n, out, config.as_mut_ptr(), flags)?, config)
    })
}

/// An existing rank passes its communicator and rank -1, a new one no communicator and its rank.
pub(crate) fn grow(
    comm: Option<CommPtr>,
    n_ranks: c_int,
    id: Option<RawUniqueId>,
    rank: c_int,
    out: Out<RawComm>,
    config: LoweredConfig,
) -> Call {
    call!("ncclCommGrow", |nccl| {
        let comm = comm.map_or(null_mut(), |comm| { comm }.0);
        let id = id.as_ref().map_or(null(), |id| &raw const *id);
        let (out, mut config) = (out.as_ptr(), config);
        read(nccl.comm_grow(comm, n_ranks, id, rank, out, config.as_mut_ptr())?, config)
    })
}

macro_rules! of_a_communicator {
    ($( $name:ident, $symbol:literal, ($($arg:ident: $type:ty),*); )*) => { $(
        pub(crate) fn $name(comm: CommPtr $(, $arg: $type)*) -> Call {
            call!($symbol, |nccl| {
                let comm = comm;
                nccl.$name(comm.0 $(, $arg)*)
            })
        }
    )* };
}

of_a_communicator! {
    comm_finalize, "ncclCommFinalize", ();
    comm_destroy, "ncclCommDestroy", ();
    comm_abort, "ncclCommAbort", ();
    comm_revoke, "ncclCommRevoke", (flags: c_int);
    comm_suspend, "ncclCommSuspend", (flags: c_int);
    comm_resume, "ncclCommResume", ();
}

pub(crate) fn red_op_destroy(comm: CommPtr, op: c_int) -> Call {
    call!("ncclRedOpDestroy", |nccl| {
        let comm = comm;
        nccl.red_op_destroy(op, comm.0)
    })
}

macro_rules! queries {
    ($( $name:ident, $function:ident, $symbol:literal, ($($arg:ident: $type:ty),*) -> $out:ty; )*) => { $(
        pub(crate) fn $name(comm: CommPtr, $($arg: $type,)* out: Out<$out>) -> Call {
            call!($symbol, |nccl| {
                let comm = comm;
                nccl.$function(comm.0, $($arg,)* out.as_ptr())
            })
        }
    )* };
}

queries! {
    comm_rank, comm_user_rank, "ncclCommUserRank", () -> c_int;
    comm_count, comm_count, "ncclCommCount", () -> c_int;
    comm_device, comm_cu_device, "ncclCommCuDevice", () -> c_int;
    async_error, comm_get_async_error, "ncclCommGetAsyncError", () -> c_int;
    mem_stat, comm_mem_stats, "ncclCommMemStats", (stat: c_int) -> u64;
    unique_id, comm_get_unique_id, "ncclCommGetUniqueId", () -> RawUniqueId;
}

pub(crate) fn properties(comm: CommPtr, out: Out<CommProperties>) -> Call {
    call!("ncclCommQueryProperties", |nccl| {
        let comm = comm;
        // The struct that an older library fills is shorter or laid out otherwise.
        nccl.require("ncclCommQueryProperties (as of 2.32.3)", DEV_COMM_VERSION)?;
        nccl.comm_query_properties(comm.0, out.as_ptr())
    })
}

/// Registers a window; `out` stays NULL where NCCL has no symmetric memory.
pub(crate) fn register_window(
    comm: CommPtr,
    memory: u64,
    bytes: usize,
    flags: c_int,
    out: Out<u64>,
) -> Call {
    call!("ncclCommWindowRegister", |nccl| {
        let comm = comm;
        nccl.comm_window_register(comm.0, memory as *mut c_void, bytes, out.as_ptr().cast(), flags)
    })
}

pub(crate) fn deregister_window(comm: CommPtr, handle: u64) -> Call {
    call!("ncclCommWindowDeregister", |nccl| {
        let comm = comm;
        nccl.comm_window_deregister(comm.0, window(handle))
    })
}

pub(crate) fn register_buffer(comm: CommPtr, memory: u64, bytes: usize, out: Out<u64>) -> Call {
    call!("ncclCommRegister", |nccl| {
        let comm = comm;
        nccl.comm_register(comm.0, memory as *mut c_void, bytes, out.as_ptr().cast())
    })
}

pub(crate) fn deregister_buffer(comm: CommPtr, handle: u64) -> Call {
    call!("ncclCommDeregister", |nccl| {
        let comm = comm;
        nccl.comm_deregister(comm.0, handle as *mut c_void)
    })
}

/// Where the scalar of an operator is.
pub(crate) enum Scalar {
    /// On the host: its bytes, read during the call.
    Host(Vec<u64>),
    /// In device memory, read by the operations that use the operator.
    Device(u64),
}

pub(crate) fn pre_mul_sum(
    comm: CommPtr,
    mut scalar: Scalar,
    data_type: c_int,
    out: Out<c_int>,
) -> Call {
    const DEVICE: c_int = 0;
    const HOST: c_int = 1;
    call!("ncclRedOpCreatePreMulSum", |nccl| {
        let comm = comm;
        let (scalar, residence) = match &mut scalar {
            Scalar::Host(bytes) => (bytes.as_mut_ptr().cast(), HOST),
            Scalar::Device(address) => (*address as *mut c_void, DEVICE),
        };
        nccl.red_op_create_pre_mul_sum(out.as_ptr(), scalar, data_type, residence, comm.0)
    })
}

/// Makes a device communicator of the layout that `requirements` names, which is this crate's.
pub(crate) fn create_dev_comm(
    comm: CommPtr,
    requirements: Arc<RequirementLists>,
    out: Out<DevComm>,
) -> Call {
    call!("ncclDevCommCreate", |nccl| {
        let comm = comm;
        nccl.dev_comm_create(comm.0, requirements.raw(), out.as_ptr())
    })
}

pub(crate) fn destroy_dev_comm(comm: CommPtr, dev_comm: Out<DevComm>) -> Call {
    call!("ncclDevCommDestroy", |nccl| {
        let comm = comm;
        nccl.dev_comm_destroy(comm.0, dev_comm.as_ptr())
    })
}
