//! Symmetric windows and pointers into them.

use crate::prelude::*;
use core::ffi::c_void;

use cuda_std::atomic::AtomicValue;
use cuda_std::view::View;
use devcomm_types::kernel::{COPIED, KernelParam, MemoryRef};
use devcomm_types::nccl::{self, MultimemHandle};

/// A symmetric buffer of `T`: every rank registered one buffer, the rank's part of the window.
///
/// Offsets, indices and the length are in elements. A kernel's parameter of this type has 16 bytes:
/// NCCL's handle and the length.
///
/// NCCL: `ncclWindow_t`, which is only the handle.
#[doc(alias = "ncclWindow_t")]
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Window<T>(nccl::Window<T>);

// SAFETY: the type is a transparent wrapper of its `Abi`.
unsafe impl<T: Element> KernelParam for Window<T> {
    type Abi = nccl::Window<T>;
    const MEMORY: &'static [MemoryRef] = &[MemoryRef::to::<T>()];
    // A window is not taken by value: rustc would pass two integers, and LLVM would not know that
    // the handle points to global memory, which costs 20 registers in the kernel `lsa_allreduce`.
    const ENTRY: u8 = COPIED;
}

#[track_callers]
impl<T: Element> Window<T> {
    /// Returns the smallest number of elements in a rank's part, among the communicator's ranks.
    pub const fn len(self) -> usize {
        self.0.len
    }

    /// Returns whether some rank's part has no elements.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns a pointer to a rank's part of the window, from the address that NCCL returns.
    fn part(self, address: *mut c_void) -> LsaPtr<T> {
        LsaPtr { pointer: address.cast(), len: Bound::new(self.len()) }
    }

    /// Returns this rank's own part. NCCL: `ncclGetLocalPointer`.
    #[doc(alias = "ncclGetLocalPointer")]
    pub fn local(self) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from a descriptor that the host registered.
        self.part(unsafe { raw::ncclGetLocalPointer(self.0.handle, 0) })
    }

    /// Returns the part of rank `peer` of the LSA team. NCCL: `ncclGetLsaPointer`.
    ///
    /// `peer` is not checked: do not use the pointer of a rank outside the LSA team.
    #[doc(alias = "ncclGetLsaPointer")]
    pub fn lsa(self, peer: i32) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from a descriptor that the host registered.
        self.part(unsafe { raw::ncclGetLsaPointer(self.0.handle, 0, peer) })
    }

    /// Returns the part of rank `peer` of `team`, which is also in the LSA team. NCCL:
    /// `ncclGetPeerPointer` with a team.
    ///
    /// `peer` is not checked: do not use the pointer of a rank outside the LSA team, for which
    /// [`DevComm::has_peer_pointer`](crate::DevComm::has_peer_pointer) is false.
    #[doc(alias = "ncclGetPeerPointer")]
    pub fn peer(self, team: Team, peer: i32) -> LsaPtr<T> {
        // SAFETY: NCCL computes an address from a descriptor that the host registered.
        self.part(unsafe { raw::ncclGetPeerPointerTeam(self.0.handle, 0, &team, peer) })
    }

    /// Returns the element `index` of every rank's part, for GIN operations. NCCL: `ncclSymPtr`.
    #[doc(alias = "ncclSymPtr")]
    pub fn at(self, index: usize) -> SymPtr<T> {
        SymPtr { window: self, index }
    }

    /// Returns the multicast address of the parts of a team, for `multimem` instructions only.
    /// NCCL: `ncclGetMultimemPointer`.
    #[doc(alias = "ncclGetMultimemPointer")]
    pub fn multimem_of(self, handle: MultimemHandle) -> *mut T {
        // SAFETY: NCCL computes an address from a descriptor that the host registered.
        unsafe { raw::ncclGetMultimemPointer(self.0.handle, 0, &handle) }.cast()
    }

    /// Returns NCCL's handle, for [`raw`](crate::raw).
    pub fn as_raw(self) -> *mut c_void {
        self.0.handle
    }

    /// Returns the multicast address of the parts of the LSA team, for `multimem` instructions
    /// only. The device communicator must have been created with `lsa_multimem`. NCCL:
    /// `ncclGetLsaMultimemPointer`.
    #[doc(alias = "ncclGetLsaMultimemPointer")]
    pub fn multimem(self, comm: &DevComm) -> *mut T {
        // SAFETY: NCCL computes an address from a descriptor that the host registered.
        unsafe { raw::ncclGetLsaMultimemPointer(self.0.handle, 0, comm.as_raw()) }.cast()
    }
}

/// A symmetric pointer for GIN operations: an index in every rank's part of a window. NCCL:
/// `ncclSymPtr`.
#[doc(alias = "ncclSymPtr")]
#[derive(Clone, Copy)]
pub struct SymPtr<T> {
    window: Window<T>,
    index: usize,
}

impl<T: Element> SymPtr<T> {
    /// Returns the window.
    pub fn window(self) -> Window<T> {
        self.window
    }

    /// Returns the element's byte offset in each part.
    pub fn byte_offset(self) -> usize {
        self.index * size_of::<T>()
    }
}

/// A pointer to one rank's part of a window: memory that other GPUs read and write too.
///
/// The simulator reports loads and stores outside the part. Kernels that are compiled with checks
/// (`cuda_builder`'s `debug`) trap at an index beyond the window's [`len`](Window::len).
#[derive(Clone, Copy, Debug)]
pub struct LsaPtr<T> {
    pointer: *mut T,
    len: Bound,
}

/// The length that accesses are checked against. Without checks it has no fields, so that an
/// [`LsaPtr`] takes only the registers of its address.
#[derive(Clone, Copy, Debug)]
struct Bound {
    #[cfg(all(target_arch = "nvptx64", debug_assertions))]
    len: usize,
}

impl Bound {
    #[allow(unused_variables)]
    fn new(len: usize) -> Self {
        Self {
            #[cfg(all(target_arch = "nvptx64", debug_assertions))]
            len,
        }
    }

    /// Panics unless elements `index..index + count` are below the bound.
    #[track_caller]
    #[allow(unused_variables)]
    fn check(self, index: usize, count: usize) {
        #[cfg(all(target_arch = "nvptx64", debug_assertions))]
        assert!(
            index < self.len && count <= self.len - index,
            "elements {index} to {} of a window that has {}",
            index.wrapping_add(count),
            self.len
        );
    }
}

#[track_callers]
impl<T: Element> LsaPtr<T> {
    /// Returns a pointer to memory outside windows, whose accesses are not checked.
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self { pointer, len: Bound::new(usize::MAX) }
    }

    /// Returns the address of element `index`, the first of `count` to access.
    ///
    /// # Safety
    ///
    /// All `count` elements lie in this part of the window.
    unsafe fn element(self, index: usize, count: usize) -> *mut T {
        self.len.check(index, count);
        // SAFETY: the caller passes an index that the window has.
        unsafe { self.pointer.add(index) }
    }

    /// Returns the address as a raw pointer.
    pub fn as_ptr(self) -> *mut T {
        self.pointer
    }

    /// Returns the part's first elements by `D` indices, of which the last one varies fastest.
    ///
    /// # Safety
    ///
    /// The part has the product of the sizes of elements.
    pub unsafe fn view<const D: usize>(self, size: [usize; D]) -> View<T, D> {
        self.len.check(0, size.iter().product());
        // SAFETY: the caller guarantees that the elements exist; windows outlive kernels.
        unsafe { View::new(self.pointer, size) }
    }

    /// Loads element `index`.
    ///
    /// # Safety
    ///
    /// `index` lies in this part of the window, and no rank writes the element at the same time.
    pub unsafe fn load(self, index: usize) -> T {
        // SAFETY: the window has this element, and no thread writes it: the caller's contract.
        unsafe { mem::load(self.element(index, 1)) }
    }

    /// Stores element `index`.
    ///
    /// # Safety
    ///
    /// `index` lies in this part of the window, and no rank accesses the element at the same time.
    pub unsafe fn store(self, index: usize, value: T) {
        // SAFETY: the caller's contract: the element exists, and only this thread accesses it.
        unsafe { mem::store(self.element(index, 1), value) }
    }

    /// Loads 16 bytes from element `index` on, by one instruction.
    ///
    /// # Safety
    ///
    /// The contract is that of [`load`](Self::load), for each of the elements, of which the first
    /// one is at a multiple of 16 bytes. The windows that the host crate allocates begin at one.
    pub unsafe fn load_vec(self, index: usize) -> Vec16<T> {
        // SAFETY: the window has these elements, and no thread writes them: the caller's contract.
        unsafe { mem::load_vec(self.element(index, Vec16::<T>::LANES)) }
    }

    /// Stores 16 bytes from element `index` on, by one instruction.
    ///
    /// # Safety
    ///
    /// The contract is that of [`store`](Self::store), for each of the elements, of which the first
    /// one is at a multiple of 16 bytes. The windows that the host crate allocates begin at one.
    pub unsafe fn store_vec(self, index: usize, value: Vec16<T>) {
        // SAFETY: the caller's contract: the element exists, and only this thread accesses it.
        unsafe { mem::store_vec(self.element(index, Vec16::<T>::LANES), value) }
    }
}

impl<T: Element + AtomicValue> LsaPtr<T> {
    /// Loads element `index`. If the value is from a [`store_release`](Self::store_release), the
    /// storing thread's earlier writes are visible after this load. PTX: `ld.acquire.sys`.
    ///
    /// # Safety
    ///
    /// `index` lies in this part of the window, and concurrent writes to it are only ordered or
    /// atomic accesses.
    #[track_caller]
    pub unsafe fn load_acquire(self, index: usize) -> T {
        // SAFETY: the caller's contract: the element exists, and writes to it are such operations.
        unsafe { mem::load_ordered(self.element(index, 1), Order::Acquire, Scope::Sys) }
    }

    /// Stores element `index`. A [`load_acquire`](Self::load_acquire) that reads the value makes
    /// this thread's earlier writes visible. PTX: `st.release.sys`.
    ///
    /// # Safety
    ///
    /// `index` lies in this part of the window, and concurrent accesses to it are only ordered or
    /// atomic accesses.
    #[track_caller]
    pub unsafe fn store_release(self, index: usize, value: T) {
        // SAFETY: the caller's contract: the element exists, and accesses are such operations.
        unsafe { mem::store_ordered(self.element(index, 1), value, Order::Release, Scope::Sys) }
    }
}
