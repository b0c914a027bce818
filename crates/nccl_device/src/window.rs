//! Symmetric windows and pointers into them.

use core::ffi::c_void;
use core::marker::PhantomData;

use cuda_std::atomic::{AtomicValue, Order, Scope};
use cuda_std::mem;
use cuda_std::vector::Vec16;
use devcomm_types::kernel::KernelParam;
use devcomm_types::nccl::{self, MultimemHandle};
use devcomm_types::{Element, Team};

use crate::{DevComm, raw};

/// A buffer of `T` that every rank registered, each with a part of its own.
///
/// Offsets and indices are in elements. The window does not know its length: kernels take counts as parameters.
///
/// NCCL: `ncclWindow_t`.
#[doc(alias = "ncclWindow_t")]
#[repr(transparent)]
pub struct Window<T>(nccl::Window<T>);

impl<T> Clone for Window<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Window<T> {}

// SAFETY: a transparent wrapper.
unsafe impl<T: Element> KernelParam for Window<T> {
    type Abi = nccl::Window<T>;
}

impl<T: Element> Window<T> {
    /// This rank's own part. NCCL: `ncclGetLocalPointer`.
    #[doc(alias = "ncclGetLocalPointer")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn local(self) -> LsaPtr<T> {
        // SAFETY: address arithmetic on the descriptor of a window that the host registered.
        LsaPtr::new(unsafe { raw::ncclGetLocalPointer(self.0.handle, 0) }.cast())
    }

    /// The part of rank `peer` of the LSA team. NCCL: `ncclGetLsaPointer`.
    ///
    /// `peer` is not checked: outside `0..lsa_team().n_ranks` the pointer must not be used.
    #[doc(alias = "ncclGetLsaPointer")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn lsa(self, peer: i32) -> LsaPtr<T> {
        // SAFETY: address arithmetic on the descriptor of a window that the host registered.
        LsaPtr::new(unsafe { raw::ncclGetLsaPointer(self.0.handle, 0, peer) }.cast())
    }

    /// The part of rank `peer` of `team`, which load and store reach. NCCL: `ncclGetPeerPointer` with a team.
    ///
    /// Nothing is checked: for a rank outside the LSA team the pointer must not be used.
    #[doc(alias = "ncclGetPeerPointer")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn peer(self, team: Team, peer: i32) -> LsaPtr<T> {
        // SAFETY: address arithmetic on the descriptor of a window that the host registered.
        LsaPtr::new(unsafe { raw::ncclGetPeerPointerTeam(self.0.handle, 0, &team, peer) }.cast())
    }

    /// Element `index` of every rank's part, as GIN takes it. NCCL: `ncclSymPtr`.
    #[doc(alias = "ncclSymPtr")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, index: usize) -> SymPtr<T> {
        SymPtr { window: self, index }
    }

    /// The multicast address of all parts of a team, for `multimem` instructions only. NCCL: `ncclGetMultimemPointer`.
    #[doc(alias = "ncclGetMultimemPointer")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn multimem_of(self, handle: MultimemHandle) -> *mut T {
        // SAFETY: address arithmetic on the descriptor of a window that the host registered.
        unsafe { raw::ncclGetMultimemPointer(self.0.handle, 0, &handle) }.cast()
    }

    /// NCCL's handle, for [`raw`](crate::raw).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn as_raw(self) -> *mut c_void {
        self.0.handle
    }

    /// The multicast address of all parts of the LSA team, for `multimem` instructions only. It exists where the device
    /// communicator was made with `lsa_multimem`. NCCL: `ncclGetLsaMultimemPointer`.
    #[doc(alias = "ncclGetLsaMultimemPointer")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn multimem(self, comm: &DevComm) -> *mut T {
        // SAFETY: address arithmetic on the descriptor of a window that the host registered.
        unsafe { raw::ncclGetLsaMultimemPointer(self.0.handle, 0, comm.as_raw()) }.cast()
    }
}

/// An element of a window, in every rank at once: what GIN's operations name. NCCL: `ncclSymPtr`.
#[doc(alias = "ncclSymPtr")]
#[derive(Clone, Copy)]
pub struct SymPtr<T> {
    window: Window<T>,
    index: usize,
}

impl<T: Element> SymPtr<T> {
    /// The window.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn window(self) -> Window<T> {
        self.window
    }

    /// The element's offset in the window in bytes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn byte_offset(self) -> usize {
        self.index * size_of::<T>()
    }
}

/// A pointer into one rank's part of a window: memory that other GPUs read and write too.
#[derive(Debug)]
pub struct LsaPtr<T> {
    pointer: *mut T,
    element: PhantomData<T>,
}

impl<T> Clone for LsaPtr<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for LsaPtr<T> {}

impl<T: Element> LsaPtr<T> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn new(pointer: *mut T) -> Self {
        Self { pointer, element: PhantomData }
    }

    /// The address, for code that needs one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn as_ptr(self) -> *mut T {
        self.pointer
    }

    /// Loads element `index`.
    ///
    /// # Safety
    ///
    /// `index` lies in the window's part, and no rank writes the element at the same time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn load(self, index: usize) -> T {
        // SAFETY: the caller's.
        unsafe { mem::load(self.pointer.add(index)) }
    }

    /// Stores element `index`.
    ///
    /// # Safety
    ///
    /// `index` lies in the window's part, and no rank reads or writes the element at the same time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn store(self, index: usize, value: T) {
        // SAFETY: the caller's.
        unsafe { mem::store(self.pointer.add(index), value) }
    }

    /// Loads 16 bytes, the elements from `index * Vec16::<T>::LANES`, by one instruction.
    ///
    /// # Safety
    ///
    /// As [`load`](Self::load), for each of the elements; the part starts on a 16-byte boundary (windows made by the host
    /// crate do).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn load_vec(self, index: usize) -> Vec16<T> {
        // SAFETY: the caller's.
        unsafe { mem::load_vec(self.pointer.add(index * Vec16::<T>::LANES)) }
    }

    /// Stores 16 bytes, the elements from `index * Vec16::<T>::LANES`, by one instruction.
    ///
    /// # Safety
    ///
    /// As [`store`](Self::store), for each of the elements; the part starts on a 16-byte boundary (windows made by the host
    /// crate do).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn store_vec(self, index: usize, value: Vec16<T>) {
        // SAFETY: the caller's.
        unsafe { mem::store_vec(self.pointer.add(index * Vec16::<T>::LANES), value) }
    }
}

impl<T: Element + AtomicValue> LsaPtr<T> {
    /// Loads element `index`; what its writer wrote before a [`store_release`](Self::store_release) that this load sees is visible
    /// after it. PTX: `ld.acquire.sys`.
    ///
    /// # Safety
    ///
    /// `index` lies in the window's part, and whoever writes it at the same time does it by ordered or atomic accesses.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn load_acquire(self, index: usize) -> T {
        // SAFETY: the caller's.
        unsafe { mem::load_ordered(self.pointer.add(index), Order::Acquire, Scope::Sys) }
    }

    /// Stores element `index`; whoever sees it by [`load_acquire`](Self::load_acquire) sees what this thread wrote before. PTX:
    /// `st.release.sys`.
    ///
    /// # Safety
    ///
    /// `index` lies in the window's part, and whoever reads or writes it at the same time does it by ordered or atomic accesses.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn store_release(self, index: usize, value: T) {
        // SAFETY: the caller's.
        unsafe { mem::store_ordered(self.pointer.add(index), value, Order::Release, Scope::Sys) }
    }
}
