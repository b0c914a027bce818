//! NCCL's C functions under their own names: one list, for GPU and host.
//!
//! On nvptx64 the list is a block of `extern` declarations that the linker resolves in
//! `libnccl_device.bc`, where every function is `alwaysinline`. On the host the same names are
//! functions that call through a table of function pointers, [`host::NcclDevice`], which a
//! simulator installs. Thus the compiler checks the simulator's signatures against this list, and a
//! call without a simulator panics with a message instead of failing to link.
//!
//! The list is generated from NCCL's bitcode and headers (`cargo xtask raw`). Whenever a kernel is
//! linked, the kernel's declarations are compared with the types in NCCL's bitcode again.
//!
//! Struct parameters that C passes by value are `*const T` here: clang passes them as `byval`
//! pointers, and LLVM inlines only calls with equal function types.
//!
//! # Functions that are native Rust
//!
//! Functions that return a struct are not listed: clang and rustc return structs in different ways,
//! and Rust can compute the result of each of these functions.
//!
#![doc = include_str!("raw/native.md")]
//!
//! # Safety
//!
//! Each function has the contract of NCCL's documentation. Cooperative functions need every thread
//! of their coop to call them with the same arguments.

use core::ffi::c_void;

use half::{bf16, f16};

#[cfg(not(target_arch = "nvptx64"))]
use devcomm_types::WaitFor;
pub use devcomm_types::nccl::{
    BarrierSession, CoopAny, DevComm, Gin, GinBarrierHandle, GinBarrierSession, GinDescriptorSmem,
    GinRequest, LlA2aHandle, LsaBarrierHandle, LsaBarrierSession, MultimemHandle, ResourceHandle,
    Team,
};
use devcomm_types::{F8E4M3, F8E5M2};

macro_rules! nccl_functions {
    ($(
        $header:literal:
        $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?;)*
    )*) => {
        #[cfg(target_arch = "nvptx64")]
        unsafe extern "C-unwind" {
            $($(
                #[doc = concat!("NCCL's `", stringify!($name), "`, declared in `", $header, "`.")]
                pub fn $name($($arg: $type),*) $(-> $ret)?;
            )*)*
        }

        #[cfg(not(target_arch = "nvptx64"))]
        pub use host::functions::*;

        #[cfg(not(target_arch = "nvptx64"))]
        pub mod host {
            //! The functions on the host: calls through a table that a simulator installs.

            use super::*;
            use std::cell::Cell;
            use std::panic::Location;
            use std::sync::OnceLock;

            /// The simulator's implementations of the listed functions and of waits.
            #[allow(non_snake_case)]
            pub struct NcclDevice {
                $($(
                    #[doc = concat!("The simulator's `", stringify!($name), "`.")]
                    pub $name: unsafe extern "C-unwind" fn($($type),*) $(-> $ret)?,
                )*)*
                /// The waits of this crate's typed layer.
                pub waits: Waits,
                /// Checks of this crate's typed layer.
                pub checks: Checks,
            }

            pub use crate::call::CoopCall;
            pub use crate::wait::FILE;

            /// What the typed layer tells the simulator, which reports misuse.
            pub struct Checks {
                /// The running thread begins a cooperative call with this coop.
                pub begin_call: fn(&CoopAny, CoopCall),
                /// The call has ended.
                pub end_call: fn(),
                /// The running thread makes a cooperative call in which the threads of the coop do
                /// not wait for each other.
                pub call_without_wait: fn(&CoopAny, CoopCall),
                /// A barrier has fenced this rank's puts on a context, or on all.
                pub puts_fenced: fn(&DevComm, context: Option<u32>),
                /// The running thread opens or closes a session on a GIN barrier.
                pub gin_barrier: fn(&DevComm, &GinBarrierUse),
            }

            /// A session on a GIN barrier.
            pub struct GinBarrierUse {
                /// Whether the session is opened, not closed.
                pub open: bool,
                /// The barriers.
                pub handle: GinBarrierHandle,
                /// The team.
                pub team: Team,
                /// Index of the barrier.
                pub index: u32,
                /// The context; `None` for all.
                pub context: Option<u32>,
                /// Whether the thread is the first of its coop.
                pub first: bool,
            }

            /// The simulator's functions for the polling loops of this crate's waits.
            pub struct Waits {
                /// Called when the running thread begins a wait, whose polls are reported at the
                /// kernel's line `at`.
                pub begin: fn(at: &'static Location<'static>),
                /// Called after each poll that found the awaited value missing: lets other threads
                /// run. The peer is a rank of the device communicator. Returns true once
                /// `deadline`, in nanoseconds of the clock, has passed.
                pub poll: fn(
                    &DevComm,
                    &WaitFor,
                    deadline: Option<u64>,
                    at: &'static Location<'static>,
                ) -> bool,
                /// Called when the running thread's wait has ended.
                pub end: fn(),
            }

            static TABLE: OnceLock<&'static NcclDevice> = OnceLock::new();

            thread_local! {
                /// Where the running thread's kernel called NCCL, for the simulator's errors.
                pub static CALL_SITE: Cell<&'static Location<'static>> =
                    Cell::new(Location::caller());
            }

            /// Installs `table` for the process. Later calls have no effect.
            pub fn install(table: &'static NcclDevice) {
                TABLE.get_or_init(|| table);
            }

            /// Returns the installed simulator's functions for waits.
            #[track_caller]
            pub(crate) fn waits() -> &'static Waits {
                &table("a wait").waits
            }

            /// Returns the installed simulator's checks.
            #[track_caller]
            pub(crate) fn checks() -> &'static Checks {
                &table("a cooperative call").checks
            }

            /// Returns the table, and stores the caller of `name` in [`CALL_SITE`].
            #[track_caller]
            fn table(name: &str) -> &'static NcclDevice {
                let Some(table) = TABLE.get() else {
                    panic!(
                        "{name} was called on the host: run this kernel in the simulator or on a \
                         GPU"
                    )
                };
                CALL_SITE.set(Location::caller());
                table
            }

            pub(super) mod functions {
                use super::*;
                $($(
                    #[doc = concat!("NCCL's `", stringify!($name), "`, declared in `")]
                    #[doc = concat!($header, "`.")]
                    ///
                    /// # Safety
                    ///
                    /// NCCL's contract for this function.
                    #[allow(non_snake_case, clippy::too_many_arguments)]
                    #[track_caller]
                    #[inline]
                    pub unsafe fn $name($($arg: $type),*) $(-> $ret)? {
                        // SAFETY: the caller's contract; the simulator's function has the contract
                        // of NCCL's.
                        unsafe { (table(stringify!($name)).$name)($($arg),*) }
                    }
                )*)*
            }
        }
    };
}

include!("raw/functions.rs");
