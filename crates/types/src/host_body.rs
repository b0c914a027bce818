//! A kernel's body, compiled for the host, with its types erased: what a simulated GPU runs.

use core::ffi::c_void;
use core::fmt;

use crate::args::KernelArgs;
use crate::kernel::{HostKernel, MemoryRef};

/// The function that a simulated GPU runs instead of a kernel's machine code.
#[derive(Clone, Copy)]
pub struct HostBody {
    name: &'static str,
    package: &'static str,
    max_threads: u32,
    cluster: u32,
    lsa_barriers: bool,
    names: &'static [&'static str],
    sizes: &'static [usize],
    memory: &'static [&'static [MemoryRef]],
    call: unsafe fn(&[*const c_void]),
}

impl HostBody {
    /// Returns the body of `K`, whose parameters have these names, whose blocks have at most
    /// `max_threads` threads, and whose clusters have `cluster` blocks; `lsa_barriers` is what
    /// [`lsa_barriers`](Self::lsa_barriers) returns.
    #[must_use]
    pub const fn new<K: HostKernel>(
        names: &'static [&'static str],
        max_threads: u32,
        cluster: u32,
        lsa_barriers: bool,
    ) -> Self {
        let (sizes, memory) = (K::Args::SIZES, K::Args::MEMORY);
        let (name, package, call) = (K::NAME, K::PACKAGE, call::<K>);
        Self { name, package, max_threads, cluster, lsa_barriers, names, sizes, memory, call }
    }

    /// Returns the kernel's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the package that the kernel is part of.
    #[must_use]
    pub const fn package(&self) -> &'static str {
        self.package
    }

    /// Returns the maximum number of threads per block.
    #[must_use]
    pub const fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// Returns the number of blocks per cluster; 1 without clusters.
    #[must_use]
    pub const fn cluster(&self) -> u32 {
        self.cluster
    }

    /// Returns whether the text of the kernel's function opens LSA barriers, by themselves or as a
    /// part of hybrid barriers (an LSA barrier and a GIN barrier together). If this is false, the
    /// kernel may still use LSA barriers: a function that it calls may open them.
    #[must_use]
    pub const fn lsa_barriers(&self) -> bool {
        self.lsa_barriers
    }

    /// Returns the size of each parameter in bytes, in order.
    #[must_use]
    pub const fn sizes(&self) -> &'static [usize] {
        self.sizes
    }

    /// Returns the name of each parameter, and the memory that it refers to.
    pub fn memory(&self) -> impl Iterator<Item = (&'static str, &'static [MemoryRef])> {
        self.names.iter().copied().zip(self.memory.iter().copied())
    }

    /// Runs one thread of the kernel.
    ///
    /// # Safety
    ///
    /// `params` holds the address of each parameter, in order, readable for its size and aligned
    /// for its type. The kernel's own contract holds. The caller is a simulated thread.
    pub unsafe fn call(&self, params: &[*const c_void]) {
        debug_assert_eq!(params.len(), self.sizes.len());
        // SAFETY: the caller passes the address of a value for each parameter.
        unsafe { (self.call)(params) }
    }
}

unsafe fn call<K: HostKernel>(params: &[*const c_void]) {
    // SAFETY: the contract of `HostBody::call`, which is the only caller.
    unsafe { K::call(K::Args::from_abi(K::Args::read(params))) }
}

/// Bodies of the same kernel are equal. Names distinguish the kernels of a package, and the
/// instances of a generic one; functions distinguish kernels of different packages with one name.
impl PartialEq for HostBody {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && core::ptr::fn_addr_eq(self.call, other.call)
    }
}

impl Eq for HostBody {}

impl fmt::Debug for HostBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBody({}, {} parameters)", self.name, self.sizes.len())
    }
}
