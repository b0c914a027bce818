//! NCCL's C functions under their own names: one list, two meanings.
//!
//! On nvptx64 the list is a block of `extern` declarations that the linker resolves in
//! `libnccl_device.bc`, where every function is `alwaysinline`. On the host the same names are
//! functions that call through a table of function pointers, [`host::NcclDevice`], which a
//! simulator installs; so nothing rests on link-time symbols, the compiler checks the simulator's
//! signatures against this list, and a call without a simulator is a sentence instead of a link
//! error.
//!
//! The list is generated from NCCL's bitcode and headers (`cargo xtask raw`), and what a kernel
//! declares is compared with NCCL's types once more whenever it is linked.
//!
//! Struct parameters that C passes by value are `*const T` here: clang passes them `byval`, which
//! LLVM sees as a pointer, and only equal function types inline.
//!
//! # Functions that are native Rust
//!
//! Functions that return a struct are not listed: clang and rustc return structs in different ways,
//! and none of these computes anything that Rust could not.
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
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        #[cfg(target_arch = "nvptx64")]
        unsafe extern "C-unwind" {
            $(
                #[doc = concat!("NCCL's `", stringify!($name), "`.")]
                $(#[$meta])*
                pub fn $name($($arg: $type),*) $(-> $ret)?;
            )*
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

            /// Every listed function, as a simulator defines it, and how it follows waits.
            #[allow(non_snake_case)]
            pub struct NcclDevice {
                $(
                    #[doc = concat!("The simulator's `", stringify!($name), "`.")]
                    $(#[$meta])*
                    pub $name: unsafe extern "C-unwind" fn($($type),*) $(-> $ret)?,
                )*
                /// The waits of the typed layer.
                pub waits: Waits,
            }

            /// What a simulator runs for the waits of the typed layer, which are loops that poll.
            pub struct Waits {
                /// Called after each poll that found the awaited value missing: lets other threads
                /// run. Returns true once `deadline`, in nanoseconds of the clock, has passed.
                pub poll:
                    fn(&WaitFor, deadline: Option<u64>, at: &'static Location<'static>) -> bool,
                /// Called when the running thread's wait has ended.
                pub end: fn(),
            }

            static TABLE: OnceLock<&'static NcclDevice> = OnceLock::new();

            thread_local! {
                /// Where the running thread's kernel called NCCL, for a simulator's reports.
                pub static CALL_SITE: Cell<&'static Location<'static>> =
                    Cell::new(Location::caller());
            }

            /// Makes `table` the process's NCCL. The first call wins; a process has one simulator.
            pub fn install(table: &'static NcclDevice) {
                TABLE.get_or_init(|| table);
            }

            /// The simulator's side of waits.
            #[track_caller]
            pub(crate) fn waits() -> &'static Waits {
                &table("a wait").waits
            }

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
                $(
                    #[doc = concat!("NCCL's `", stringify!($name), "`.")]
                    $(#[$meta])*
                    ///
                    /// # Safety
                    ///
                    /// NCCL's contract for this function.
                    #[allow(non_snake_case, clippy::too_many_arguments)]
                    #[track_caller]
                    #[inline]
                    pub unsafe fn $name($($arg: $type),*) $(-> $ret)? {
                        // SAFETY: the caller's; the simulator's function has the contract of
                        // NCCL's.
                        unsafe { (table(stringify!($name)).$name)($($arg),*) }
                    }
                )*
            }
        }
    };
}

// The list.
include!("raw/functions.rs");
