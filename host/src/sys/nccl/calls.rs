//! Every call of NCCL that takes a communicator, as a [`Call`]. Callers have checked the arguments;
//! device memory, windows and streams are given as integer addresses.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use devcomm_types::DevComm;

use super::DEV_COMM_VERSION;
use super::call::{Call, CommPtr, Out};
use super::lists::RequirementLists;
use super::lists_config::{LoweredCollectiveConfig, LoweredConfig};
use crate::error::Result;
use devcomm_sys::nccl::{
    CommProperties, IN_PROGRESS, RawComm, RawStream, RawUniqueId, RawWaitSignal, RawWindow,
};

/// The flags of one-sided operations.
const NO_FLAGS: c_uint = 0;

/// The arguments of a collective or a point-to-point operation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operands {
    pub send: u64,
    pub recv: u64,
    /// The count in elements, as the NCCL function defines it.
    pub count: usize,
    pub data_type: c_int,
    /// The operator of reductions.
    pub op: c_int,
    /// The root of collectives that have one.
    pub root: c_int,
    pub stream: u64,
}

fn stream(address: u64) -> RawStream {
    address as RawStream
}

fn window(address: u64) -> RawWindow {
    address as RawWindow
}

/// Makes a [`Call`] of an expression. The expression uses a [`CommPtr`] as a whole (`{ comm }.0`):
/// of `comm.0` the closure would capture only the pointer, which is not `Send`.
macro_rules! call {
    ($symbol:literal, |$nccl:ident| $body:expr) => {
        // SAFETY: the body passes arguments that are live by the contract of `Call::make`, and
        // `Out` cells that it owns.
        unsafe { Call::new($symbol, move |$nccl| $body) }
    };
}

macro_rules! collectives {
    ($( $name:ident, $with_config:ident, $symbol:literal, ($($extra:ident),*); )*) => { $(
        pub(crate) fn $name(
            comm: CommPtr,
            on: Operands,
            config: Option<Arc<LoweredCollectiveConfig>>,
        ) -> Call {
            call!($symbol, |nccl| {
                let comm = comm;
                let (send, recv) = (on.send as *const c_void, on.recv as *mut c_void);
                let (count, data_type, stream) = (on.count, on.data_type, stream(on.stream));
                match &config {
                    None => nccl.$name(send, recv, count, data_type, $(on.$extra,)* comm.0, stream),
                    Some(config) => nccl.$with_config(
                        send, recv, count, data_type, $(on.$extra,)* comm.0, stream,
                        config.as_ptr(),
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

/// Declares functions that return calls on a communicator.
macro_rules! on_a_communicator {
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($($arg:ident: $type:ty),* $(,)?)
            = $symbol:literal, |$nccl:ident, $comm:ident| $body:expr;
    )*) => { $(
        $(#[doc = $doc])*
        pub(crate) fn $name(comm: CommPtr, $($arg: $type),*) -> Call {
            call!($symbol, |$nccl| {
                let $comm = { comm }.0;
                $body
            })
        }
    )* };
}

on_a_communicator! {
    fn send(on: Operands, peer: c_int) = "ncclSend", |nccl, comm| {
        let from = on.send as *const c_void;
        nccl.send(from, on.count, on.data_type, peer, comm, stream(on.stream))
    };

    fn recv(on: Operands, peer: c_int) = "ncclRecv", |nccl, comm| {
        let to = on.recv as *mut c_void;
        nccl.recv(to, on.count, on.data_type, peer, comm, stream(on.stream))
    };

    /// `offset` is in bytes, from the start of the peer's window.
    fn put_signal(on: Operands, to: Target, peer_window: u64, offset: usize)
        = "ncclPutSignal", |nccl, comm| {
            let (from, peer_window, stream) =
                (on.send as *const c_void, window(peer_window), stream(on.stream));
            nccl.put_signal(
                from, on.count, on.data_type, to.peer, peer_window, offset, to.signal, to.context,
                NO_FLAGS, comm, stream,
            )
        };

    fn signal(to: Target, on: u64) = "ncclSignal", |nccl, comm|
        nccl.signal(to.peer, to.signal, to.context, NO_FLAGS, comm, stream(on));

    fn wait_signal(waits: Vec<RawWaitSignal>, on: u64) = "ncclWaitSignal", |nccl, comm| {
        let (n, mut waits) = (waits.len() as c_int, waits);
        nccl.wait_signal(n, waits.as_mut_ptr(), comm, stream(on))
    };

    /// `color` -1 is `NCCL_SPLIT_NOCOLOR`.
    fn split(color: c_int, key: c_int, out: Out<RawComm>, config: LoweredConfig)
        = "ncclCommSplit", |nccl, comm| {
            let mut config = config;
            let code = nccl.comm_split(comm, color, key, out.as_ptr(), config.as_mut_ptr())?;
            leak_if_in_progress(code, config)
        };

    fn shrink(exclude: Vec<c_int>, out: Out<RawComm>, config: LoweredConfig, flags: c_int)
        = "ncclCommShrink", |nccl, comm| {
            let (n, mut exclude, mut config) = (exclude.len() as c_int, exclude, config);
            let (out, exclude) = (out.as_ptr(), exclude.as_mut_ptr());
            let code = nccl.comm_shrink(comm, exclude, n, out, config.as_mut_ptr(), flags)?;
            leak_if_in_progress(code, config)
        };

    fn comm_finalize() = "ncclCommFinalize", |nccl, comm| nccl.comm_finalize(comm);
    fn comm_destroy() = "ncclCommDestroy", |nccl, comm| nccl.comm_destroy(comm);
    fn comm_abort() = "ncclCommAbort", |nccl, comm| nccl.comm_abort(comm);
    fn comm_revoke(flags: c_int) = "ncclCommRevoke", |nccl, comm| nccl.comm_revoke(comm, flags);
    fn comm_suspend(flags: c_int) = "ncclCommSuspend", |nccl, comm| nccl.comm_suspend(comm, flags);
    fn comm_resume() = "ncclCommResume", |nccl, comm| nccl.comm_resume(comm);
    fn red_op_destroy(op: c_int) = "ncclRedOpDestroy", |nccl, comm| nccl.red_op_destroy(op, comm);

    fn comm_rank(out: Out<c_int>) = "ncclCommUserRank", |nccl, comm|
        nccl.comm_user_rank(comm, out.as_ptr());
    fn comm_count(out: Out<c_int>) = "ncclCommCount", |nccl, comm|
        nccl.comm_count(comm, out.as_ptr());
    fn comm_device(out: Out<c_int>) = "ncclCommCuDevice", |nccl, comm|
        nccl.comm_cu_device(comm, out.as_ptr());
    fn async_error(out: Out<c_int>) = "ncclCommGetAsyncError", |nccl, comm|
        nccl.comm_get_async_error(comm, out.as_ptr());
    fn mem_stat(stat: c_int, out: Out<u64>) = "ncclCommMemStats", |nccl, comm|
        nccl.comm_mem_stats(comm, stat, out.as_ptr());
    fn unique_id(out: Out<RawUniqueId>) = "ncclCommGetUniqueId", |nccl, comm|
        nccl.comm_get_unique_id(comm, out.as_ptr());

    fn properties(out: Out<CommProperties>) = "ncclCommQueryProperties", |nccl, comm| {
        // The struct of an older library is shorter or has another layout.
        nccl.require("ncclCommQueryProperties (as of 2.32.3)", DEV_COMM_VERSION)?;
        nccl.comm_query_properties(comm, out.as_ptr())
    };

    /// Registers a window; `out` stays NULL where NCCL has no symmetric memory.
    fn register_window(memory: u64, bytes: usize, flags: c_int, out: Out<u64>)
        = "ncclCommWindowRegister", |nccl, comm| {
            let (memory, out) = (memory as *mut c_void, out.as_ptr().cast());
            nccl.comm_window_register(comm, memory, bytes, out, flags)
        };

    fn deregister_window(handle: u64) = "ncclCommWindowDeregister", |nccl, comm|
        nccl.comm_window_deregister(comm, window(handle));

    fn register_buffer(memory: u64, bytes: usize, out: Out<u64>)
        = "ncclCommRegister", |nccl, comm|
        nccl.comm_register(comm, memory as *mut c_void, bytes, out.as_ptr().cast());

    fn deregister_buffer(handle: u64) = "ncclCommDeregister", |nccl, comm|
        nccl.comm_deregister(comm, handle as *mut c_void);

    /// Makes a device communicator. `requirements` contains the version of its struct layout.
    fn create_dev_comm(requirements: Arc<RequirementLists>, out: Out<DevComm>)
        = "ncclDevCommCreate", |nccl, comm|
        nccl.dev_comm_create(comm, requirements.raw(), out.as_ptr());

    fn destroy_dev_comm(dev_comm: Out<DevComm>) = "ncclDevCommDestroy", |nccl, comm|
        nccl.dev_comm_destroy(comm, dev_comm.as_ptr());
}

/// The destination of a signal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub peer: c_int,
    pub signal: c_int,
    pub context: c_int,
}

/// Returns `code`. Leaks the configuration if the call continues in the background: NCCL may still
/// read it. Unique ids and lists of ranks are copied in the call.
fn leak_if_in_progress(code: c_int, config: LoweredConfig) -> Result<c_int> {
    if code == IN_PROGRESS {
        std::mem::forget(config);
    }
    Ok(code)
}

/// Creates a rank's communicator. The current CUDA context of the thread is of the rank's device.
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
        leak_if_in_progress(
            nccl.comm_init_rank_scalable(out, n_ranks, rank, n_ids, ids, config)?,
            owned,
        )
    })
}

/// Creates communicators on all `devices`, and writes them to `outs` in order.
pub(crate) fn init_all(outs: Vec<Out<RawComm>>, devices: Vec<c_int>) -> Call {
    call!("ncclCommInitAll", |nccl| {
        let mut raw: Vec<RawComm> = vec![null_mut(); outs.len()];
        let n = devices.len() as c_int;
        let code = nccl.comm_init_all(raw.as_mut_ptr(), n, devices.as_ptr())?;
        for (out, raw) in outs.iter().zip(raw) {
            AtomicPtr::from_ptr(out.as_ptr()).store(raw, Ordering::Release);
        }
        Ok(code)
    })
}

/// Grows the communicator: an existing rank passes its communicator and rank -1; a new rank passes
/// no communicator and its rank. All new ranks pass `id`, and the existing rank that has made it.
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
        leak_if_in_progress(
            nccl.comm_grow(comm, n_ranks, id, rank, out, config.as_mut_ptr())?,
            config,
        )
    })
}

/// The scalar of a custom operator.
pub(crate) enum Scalar {
    /// A scalar in host memory: its bytes, which the call reads, as words for their alignment.
    Host(Vec<u64>),
    /// A scalar in device memory. The operations that use the operator read it.
    Device(u64),
}

/// Creates an operator that multiplies each rank's elements by its scalar, and adds.
pub(crate) fn pre_mul_sum(
    comm: CommPtr,
    mut scalar: Scalar,
    data_type: c_int,
    out: Out<c_int>,
) -> Call {
    // `ncclScalarDevice` and `ncclScalarHostImmediate`.
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
