//! Making several calls in one NCCL group.

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
