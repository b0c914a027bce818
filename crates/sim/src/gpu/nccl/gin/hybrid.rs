//! The hybrid barrier of NCCL's C functions: an LSA barrier, then a GIN barrier on the rail team.
//! Unlike NCCL's C++ functions, the C functions never use the dense barrier (a GIN barrier of all
//! connected ranks), so with some fences and connections they do not synchronise all ranks. The
//! simulator then fails the kernel.

use devcomm_types::nccl::{
    BarrierSession, CoopAny, Gin, GinBarrierHandle, LsaBarrierHandle, MultimemHandle, Team,
};

use super::{Call, barrier};
use crate::gpu::nccl::coop::Coop;
use crate::gpu::nccl::{caller, lsa_barrier};

/// The simulator's representation of a session.
#[repr(C)]
struct Session {
    lsa: lsa_barrier::Session,
    rail: barrier::Session,
}

const _: () = assert!(size_of::<Session>() <= size_of::<BarrierSession>());

#[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn init(
    session: *mut BarrierSession,
    coop: *const CoopAny,
    inner_team: *const Team,
    outer_team: *const Team,
    net: *const Gin,
    inner_handle: *const LsaBarrierHandle,
    outer_handle: *const GinBarrierHandle,
    index: u32,
    multimem: bool,
    multimem_handle: *const MultimemHandle,
) {
    // SAFETY: the kernel passes a handle, a coop, teams and handles, and memory for a session,
    // which is at least as large as `Session`.
    unsafe {
        let call = Call::on(net);
        let lsa = lsa_barrier::Session {
            coop: *coop,
            comm: call.handle.comm,
            team: *inner_team,
            handle: *inner_handle,
            index,
            multimem,
            multimem_handle: *multimem_handle,
            epoch: 0,
        };
        let rail = barrier::Session::new(&call, *coop, *outer_team, *outer_handle, index, false);
        let lsa = lsa.open(call.thread, call.at);
        session.cast::<Session>().write(Session { lsa, rail });
    }
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn sync(
    session: *mut BarrierSession,
    _coop: *const CoopAny,
    order: i32,
    fence: i32,
) {
    let (thread, at) = caller();
    // SAFETY: the kernel opened the session while its device communicator is in scope.
    let (session, comm) = unsafe {
        let session = &mut *session.cast::<Session>();
        let comm = &*session.lsa.comm;
        (session, comm)
    };
    // NCCL takes the LSA and the rail barrier if there are no puts to fence, or if GIN connects
    // only rails: then the stride of connected ranks is the size of the LSA team.
    if fence & barrier::FENCE_PUT != 0 && comm.gin_context_stride != comm.lsa_size as u32 {
        let does = match comm.gin_context_stride {
            1 => "does nothing here",
            _ => "synchronises the LSA team only here",
        };
        let what = format!(
            "NCCL's hybrid barrier {does}: with a fence of puts, and more connected ranks than \
             the rail team's, it needs the dense barrier, which its C functions do not use; use a \
             RAIL connection, a fence without puts, or your own barrier"
        );
        thread.misuse(at, what);
    }
    let coop = Coop::of(&session.lsa.coop, thread, at);
    // NCCL passes only the release half to the first one and the acquire half to the second one.
    // Here each has the whole order, which is what NCCL promises of the barrier.
    session.lsa.arrive(thread, coop, order, at);
    session.lsa.wait(thread, coop, order, at);
    session.rail.sync(thread, at, order, fence);
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn destroy(session: *mut BarrierSession) {
    let (thread, at) = caller();
    // SAFETY: the kernel opened the session.
    let session = unsafe { &mut *session.cast::<Session>() };
    let coop = Coop::of(&session.lsa.coop, thread, at);
    session.rail.set_open(&Call::with(session.rail.handle, thread, at), false);
    session.lsa.close(thread, coop, at);
}

pub(in crate::gpu::nccl) unsafe extern "C-unwind" fn size() -> usize {
    size_of::<BarrierSession>()
}
