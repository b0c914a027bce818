//! Making several calls in one NCCL group.

use std::ffi::c_int;
use std::ptr::{null, null_mut};

use super::Nccl;
use super::call::{Call, Out};
use crate::error::Result;
use crate::sys::cuda::Binder;
use devcomm_sys::nccl::SimInfo;

/// A call, with the CUDA context and the rank of its communicator.
pub(crate) struct BatchedCall {
    pub call: Call,
    pub binder: Binder,
    pub rank: usize,
}

/// Makes all calls on this thread, in one group. With `simulation`, the group launches nothing and
/// writes its estimate there.
///
/// # Safety
///
/// The contract of [`Call::make`] holds for each call until the group has ended.
pub(crate) unsafe fn make_all(
    nccl: &Nccl,
    calls: Vec<BatchedCall>,
    simulation: Option<Out<SimInfo>>,
) -> Result<()> {
    // SAFETY: a group belongs to the thread, and is ended below in every case.
    let code = unsafe { nccl.group_start()? };
    nccl.check("ncclGroupStart", code, None)?;
    let mut first = Ok(());
    for BatchedCall { call, binder, rank } in calls {
        let operation = call.operation;
        let made = binder.bind().and_then(|()| {
            // SAFETY: the caller passes calls whose arguments are alive.
            let code = unsafe { call.make(nccl)? };
            nccl.check(operation, code, Some(rank))
        });
        if made.is_err() {
            first = made;
            // NCCL does not know of a failure on the host, nor of one of a call that it makes at
            // once: it would start the operations before.
            // SAFETY: the group was started above, on this thread.
            let _ = unsafe { fail_group(nccl) };
            break;
        }
    }
    let (operation, code) = match simulation {
        None => {
            // SAFETY: started above, on this thread.
            ("ncclGroupEnd", unsafe { nccl.group_end()? })
        }
        Some(out) => {
            // SAFETY: as above; the struct is live and contains its size and version.
            ("ncclGroupSimulateEnd", unsafe { nccl.group_simulate_end(out.as_ptr())? })
        }
    };
    // If a call failed, the end of the group fails too, with less information.
    first.and_then(|()| nccl.check(operation, code, None))
}

/// Makes the thread's open group fail: its end starts nothing.
///
/// # Safety
///
/// A group is open on this thread.
unsafe fn fail_group(nccl: &Nccl) -> Result<c_int> {
    let (from, to, comm, stream) = (null(), null_mut(), null_mut(), null_mut());
    // SAFETY: NCCL refuses a NULL communicator before it uses the other arguments.
    unsafe { nccl.all_reduce(from, to, 0, 0, 0, comm, stream) }
}
