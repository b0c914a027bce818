//! A kernel's body on the host with its types forgotten: what a simulated machine runs.

use core::ffi::c_void;
use core::fmt;

use crate::kernel::{HostKernel, KernelArgs};

/// What a simulated GPU has in the place of a kernel's machine code.
#[derive(Clone, Copy)]
pub struct HostBody {
    name: &'static str,
    max_threads: u32,
    params: &'static [usize],
    call: unsafe fn(&[*const c_void]),
}

impl HostBody {
    /// That of `K`, of which a block has at most `max_threads` threads.
    #[must_use]
    pub const fn new<K: HostKernel>(max_threads: u32) -> Self {
        Self { name: K::NAME, max_threads, params: K::Args::SIZES, call: call::<K> }
    }

    /// The kernel's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Threads that a block has at most.
    #[must_use]
    pub const fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// The size of each parameter in bytes, in order.
    #[must_use]
    pub const fn params(&self) -> &'static [usize] {
        self.params
    }

    /// Runs one thread of the kernel.
    ///
    /// # Safety
    ///
    /// `params` holds the address of each parameter, in order, of its size and aligned for its
    /// type; the kernel's own contract holds, and a simulated thread is current.
    pub unsafe fn call(&self, params: &[*const c_void]) {
        debug_assert_eq!(params.len(), self.params.len());
        // SAFETY: the caller's.
        unsafe { (self.call)(params) }
    }
}

unsafe fn call<K: HostKernel>(params: &[*const c_void]) {
    // SAFETY: the caller of `HostBody::call` has the parameters where it says, and keeps the
    // kernel's contract.
    unsafe { K::call(K::Args::from_abi(K::Args::read(params))) }
}

/// Of one kernel: two instances of a generic one have names of their own.
impl PartialEq for HostBody {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && core::ptr::fn_addr_eq(self.call, other.call)
    }
}

impl Eq for HostBody {}

impl fmt::Debug for HostBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBody({}, {} parameters)", self.name, self.params.len())
    }
}
