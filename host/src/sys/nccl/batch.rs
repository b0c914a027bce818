//! Calls made together, in one of NCCL's groups.

use super::Nccl;
use super::call::{Call, Out};
use crate::error::Result;
use crate::sys::cuda::Binder;
use devcomm_sys::nccl::{IN_PROGRESS, SUCCESS, SimInfo};

/// A call, the context of its communicator and the rank.
pub(crate) struct BatchedCall {
    pub call: Call,
    pub binder: Binder,
    pub rank: usize,
}

/// Makes all calls on this thread, in one group. With `simulation`, nothing is launched and the
/// estimate goes there.
///
/// # Safety
///
/// The contract of [`Call::make`] holds for each of them until the group has ended.
pub(crate) unsafe fn make_all(
    nccl: &Nccl,
    members: Vec<BatchedCall>,
    simulation: Option<Out<SimInfo>>,
) -> Result<()> {
    // SAFETY: a group is the thread's own, and it is ended below whatever happens.
    let code = unsafe { nccl.group_start()? };
    nccl.check("ncclGroupStart", code, None)?;
    let mut first = Ok(());
    for BatchedCall { call, binder, rank } in members {
        let operation = call.operation;
        let made = binder.bind().and_then(|()| {
            // SAFETY: the caller's contract.
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
            // SAFETY: as above; the struct is live and says its own size and version.
            ("ncclGroupSimulateEnd", unsafe { nccl.group_simulate_end(out.as_ptr())? })
        }
    };
    // The end of a group in which a call failed fails too, and says less.
    first.and_then(|()| match code {
        SUCCESS | IN_PROGRESS => Ok(()),
        failed => nccl.check(operation, failed, None),
    })
}
