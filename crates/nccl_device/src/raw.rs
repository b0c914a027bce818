//! NCCL's C functions under their own names: one list, two meanings.
//!
//! On nvptx64 the list is a block of `extern` declarations that the linker resolves in `libnccl_device.bc`, where every
//! function is `alwaysinline`. On the host the same names are functions that call through a table of function pointers,
//! [`host::NcclDevice`], which a simulator installs; so nothing rests on link-time symbols, the compiler checks the
//! simulator's signatures against this list, and a call without a simulator is a sentence instead of a link error.
//!
//! Struct parameters that C passes by value are `*const T` here: clang passes them `byval`, which LLVM sees as a pointer, and
//! only equal function types inline. Functions that return a struct are not listed; their results are fields of the
//! public [`DevComm`].
//!
//! # Safety
//!
//! Each function has the contract of NCCL's documentation. Cooperative functions need every thread of their coop to call
//! them with the same arguments.

use core::ffi::c_void;

pub use devcomm_types::nccl::{
    CoopAny, DevComm, LsaBarrierHandle, LsaBarrierSession, MultimemHandle, ResourceHandle, Team,
};

macro_rules! nccl_functions {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        #[cfg(target_arch = "nvptx64")]
        unsafe extern "C-unwind" {
            $($(#[$meta])* pub fn $name($($arg: $type),*) $(-> $ret)?;)*
        }

        #[cfg(not(target_arch = "nvptx64"))]
        pub use host::functions::*;

        #[cfg(not(target_arch = "nvptx64"))]
        pub mod host {
            //! The host's meaning of the list: a table that a simulator installs.

            use super::*;
            use std::cell::Cell;
            use std::panic::Location;
            use std::sync::OnceLock;

            /// Every listed function, as a simulator defines it.
            #[allow(non_snake_case)]
            pub struct NcclDevice {
                $($(#[$meta])* pub $name: unsafe extern "C-unwind" fn($($type),*) $(-> $ret)?,)*
            }

            static TABLE: OnceLock<&'static NcclDevice> = OnceLock::new();

            thread_local! {
                /// Where the running thread's kernel called NCCL, for a simulator's reports.
                pub static CALL_SITE: Cell<&'static Location<'static>> = Cell::new(Location::caller());
            }

            /// Makes `table` the process's NCCL. The first call wins; a process has one simulator.
            pub fn install(table: &'static NcclDevice) {
                TABLE.get_or_init(|| table);
            }

            #[track_caller]
            fn table(name: &str) -> &'static NcclDevice {
                let Some(table) = TABLE.get() else {
                    panic!("{name} was called on the host: run this kernel in the simulator or on a GPU")
                };
                CALL_SITE.set(Location::caller());
                table
            }

            pub(super) mod functions {
                use super::*;
                $(
                    $(#[$meta])*
                    ///
                    /// # Safety
                    ///
                    /// NCCL's contract for this function.
                    #[allow(non_snake_case, clippy::too_many_arguments)]
                    #[track_caller]
                    #[inline]
                    pub unsafe fn $name($($arg: $type),*) $(-> $ret)? {
                        // SAFETY: the caller's; the simulator's function has the contract of NCCL's.
                        unsafe { (table(stringify!($name)).$name)($($arg),*) }
                    }
                )*
            }
        }
    };
}

nccl_functions! {
    /// Address of byte `offset` in this rank's part of a window.
    fn ncclGetLocalPointer(window: *mut c_void, offset: usize) -> *mut c_void;
    /// Address of byte `offset` in the part of LSA rank `peer`. No check of either.
    fn ncclGetLsaPointer(window: *mut c_void, offset: usize, peer: i32) -> *mut c_void;
    /// Address of byte `offset` in the part of world rank `peer`; meaningless when `peer` is not in the LSA team.
    fn ncclGetPeerPointer(window: *mut c_void, offset: usize, peer: i32) -> *mut c_void;
    /// Multicast address of byte `offset` over the LSA team.
    fn ncclGetLsaMultimemPointer(window: *mut c_void, offset: usize, comm: *const DevComm) -> *mut c_void;
    /// The coop of one thread.
    fn ncclCoopAnyInitThread(coop: *mut CoopAny);
    /// The coop of the caller's warp.
    fn ncclCoopAnyInitWarp(coop: *mut CoopAny);
    /// The coop of some lanes of the caller's warp.
    fn ncclCoopAnyInitLanes(coop: *mut CoopAny, lane_mask: u32);
    /// The coop of warps `warp0..warp0 + n_warps` of the block; `id` is 0 to 14, one a span in use.
    fn ncclCoopAnyInitWarpSpan(coop: *mut CoopAny, warp0: i32, n_warps: i32, id: i32);
    /// The coop of the whole block.
    fn ncclCoopAnyInitCta(coop: *mut CoopAny);
    /// The caller's place in its coop.
    fn ncclCoopThreadRank(coop: *const CoopAny) -> i32;
    /// Threads of the coop.
    fn ncclCoopSize(coop: *const CoopAny) -> i32;
    /// Barrier of the coop.
    fn ncclCoopSync(coop: *const CoopAny);
    /// Opens a session on barrier `index`: reads its epoch.
    fn ncclLsaBarrierSessionInit(
        session: *mut LsaBarrierSession, coop: *const CoopAny, comm: *const DevComm, team: *const Team,
        handle: *const LsaBarrierHandle, index: u32, multimem: bool, multimem_handle: *const MultimemHandle,
    );
    /// Tells the peers that this coop arrived.
    fn ncclLsaBarrierSessionArrive(session: *mut LsaBarrierSession, coop: *const CoopAny, order: i32);
    /// Waits until every peer arrived.
    fn ncclLsaBarrierSessionWait(session: *mut LsaBarrierSession, coop: *const CoopAny, order: i32);
    /// Arrive, then wait.
    fn ncclLsaBarrierSessionSync(session: *mut LsaBarrierSession, coop: *const CoopAny, order: i32);
    /// Closes the session: stores the epoch. Without it the next session on the index passes silently.
    fn ncclLsaBarrierSessionDestroy(session: *mut LsaBarrierSession);
}
