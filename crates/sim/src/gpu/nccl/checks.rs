//! The functions by which `nccl_device`'s typed layer tells the simulator of cooperative calls, and
//! of sessions on GIN barriers.

use devcomm_types::nccl::{CoopAny, DevComm};
use nccl_device::raw::host::{Checks, CoopCall, GinBarrierUse};

use super::caller;
use super::coop::{Coop, coop_rank};
use super::divergence;
use super::gin::{GinComm, barrier};
use crate::gpu::thread::Thread;

pub(super) const CHECKS: Checks =
    Checks { begin_call, end_call, call_without_wait, gin_barrier, puts_fenced };

fn begin_call(coop: &CoopAny, call: CoopCall) {
    let (thread, at) = caller();
    let coop = Coop::of(coop, thread, at);
    coop_rank(coop, thread, at);
    if !matches!(coop, Coop::Thread) {
        thread.coop_call.set(Some(call));
    }
}

fn end_call() {
    Thread::current().coop_call.set(None);
}

fn call_without_wait(coop: &CoopAny, call: CoopCall) {
    let (thread, at) = caller();
    divergence::call(thread, Coop::of(coop, thread, at), call, at);
}

/// Returns the GIN state behind a device communicator, if it has any.
fn gin_of(comm: &DevComm) -> Option<&GinComm> {
    // SAFETY: a kernel's device communicator points to its `GinComm`, which outlives the launch.
    unsafe { comm.gin_handles[0].cast::<GinComm>().as_ref() }
}

fn gin_barrier(comm: &DevComm, session: &GinBarrierUse) {
    let (thread, at) = caller();
    let GinBarrierUse { open, handle, team, index, context, first } = *session;
    let Some(gin) = gin_of(comm) else { return };
    let signal = match barrier::first_signal(gin, team, handle, index) {
        Ok(signal) => signal,
        Err(what) => thread.misuse(at, what),
    };
    if first {
        gin.session(thread, at, (comm.rank as u32, context), (index, signal), open);
    }
}

fn puts_fenced(comm: &DevComm, context: Option<u32>) {
    if let Some(gin) = gin_of(comm) {
        gin.network.fenced(gin.id, comm.rank as u32, context);
    }
}
