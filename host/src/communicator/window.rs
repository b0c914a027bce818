//! Symmetric windows: memory that the kernels of every rank can access.

mod pointers;
mod registration;

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use devcomm_types::{ArgInfo, Element, IntoArg, Window as DeviceWindow};
use parking_lot::Mutex;

pub use self::pointers::LogicalEndpoint;
use super::Communicator;
use super::deferred::{CallState, SharedState};
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::device::{Buffer, CreationTime, DeviceSlice, KeepAlive, Lifecycle};
use crate::error::{Error, Result};
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

bitflags::bitflags! {
    /// How a window is registered. NCCL: `NCCL_WIN_*`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WindowFlags: i32 {
        /// All ranks use, in a collective, the same offset in the window, which allows NCCL's
        /// symmetric kernels. [`Communicator::window`] sets this. NCCL:
        /// `NCCL_WIN_COLL_SYMMETRIC`.
        const COLL_SYMMETRIC = 1;
        /// Puts and signals to the window stay in order, which VA signals (signals at addresses in
        /// the window) need. NCCL: `NCCL_WIN_STRICT_ORDERING`.
        const STRICT_ORDERING = 2;
        /// Network access only: no load and store by peers. NCCL: `NCCL_WIN_GIN_ONLY`.
        const GIN_ONLY = 4;
        /// The window is for counted CFT writes. NCCL: `NCCL_WIN_CFT_COUNTED`.
        const CFT_COUNTED = 8;
    }
}

/// Device memory of `len` elements `T`, registered on every rank of a communicator.
///
/// Created by [`Communicator::window`] and [`Communicator::register_window`]. A launch takes
/// `&Window<T>` where the kernel has a `Window<T>`.
///
/// The registration ends with [`close`](Self::close), with the communicator, or when the window is
/// dropped. The memory is freed when nothing else uses it. Neither waits for other ranks: a barrier
/// at the end of the kernels must ensure that those of *other* ranks no longer use this window.
/// After an abort has ended kernels while they waited, as a deadline does, or a rank is lost, there
/// was no such barrier: then windows stay registered, and their memory allocated.
///
/// NCCL: `ncclCommWindowRegister`, `ncclCommWindowDeregister`.
#[doc(alias = "ncclCommWindowRegister")]
#[doc(alias = "ncclWindow_t")]
#[must_use = "dropping it ends the registration"]
pub struct Window<T: Element> {
    inner: Arc<Inner>,
    len: usize,
    element: PhantomData<T>,
}

struct Inner {
    /// NCCL writes it when the call is made, possibly at the end of a group.
    handle: Out<u64>,
    state: SharedState,
    life: Lifecycle,
    address: u64,
    bytes: usize,
    flags: WindowFlags,
    /// The window's size on each rank; `None` if the ranks have no host exchange.
    rank_bytes: Option<Vec<u64>>,
    /// The number among the windows of the communicator, the same on all ranks.
    number: u64,
    /// Keeps the memory allocated; `None` for memory of another library.
    memory: Mutex<Option<KeepAlive>>,
    communicator: Communicator,
    created_at: CreationTime,
}

impl Inner {
    /// Returns the index of a slice's first element, in elements `T`, if it is at a multiple of
    /// their size, and the window is one of this communicator.
    fn index_of<T, U>(&self, slice: &DeviceSlice<U>, comm: &Communicator) -> Option<usize> {
        if !self.communicator.is(comm) {
            return None;
        }
        // Callers pass slices that this window owns, which begin in it.
        let bytes = usize::try_from(slice.device_address() - self.address).ok()?;
        bytes.is_multiple_of(size_of::<T>()).then_some(bytes / size_of::<T>())
    }
}

impl Communicator {
    /// Allocates a symmetric window of `len` elements, zeroed, and registers it with every rank.
    /// *Collective*; the ranks may pass different lengths, of which kernels get the smallest. If
    /// the allocation fails on a rank, the call fails on all of them.
    ///
    /// NCCL: `ncclMemAlloc`, `ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`mem_alloc`](Self::mem_alloc) and
    /// [`register_window`](Self::register_window).
    #[doc(alias = "ncclCommWindowRegister")]
    pub fn window<T: Element>(&self, len: usize) -> Result<Window<T>> {
        self.require_live()?;
        let memory = self.mem_alloc(len).map(|memory| memory.device_slice());
        self.register_memory(memory, WindowFlags::COLL_SYMMETRIC)
    }

    /// Registers memory as a window. *Collective*; the ranks' memory may differ in length, the
    /// flags may not. Inside a [`group`](crate::group()) several windows are registered together,
    /// and can be used once the group has ended.
    ///
    /// One buffer can be registered with several communicators.
    ///
    /// NCCL: `ncclCommWindowRegister`.
    ///
    /// # Errors
    ///
    /// [`DevCommError::NoWindow`] where the ranks have no symmetric memory, [`Error::InvalidInput`]
    /// for memory that does not begin at a multiple of 4096 bytes, is of another context or empty,
    /// and for flags that exclude each other; [`StateError::Capturing`] while a stream is captured.
    /// After these, the other ranks get [`WorldError::CallFailed`](crate::WorldError::CallFailed).
    /// [`WorldError::OptionsDiffer`](crate::WorldError::OptionsDiffer) for other flags in another
    /// rank, [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`], [`Error::Nccl`].
    ///
    /// [`DevCommError::NoWindow`]: crate::DevCommError::NoWindow
    /// [`StateError::Capturing`]: crate::StateError::Capturing
    /// [`StateError::CommunicatorEnded`]: crate::StateError::CommunicatorEnded
    #[doc(alias = "ncclCommWindowRegister")]
    pub fn register_window<B>(&self, buffer: &B, flags: WindowFlags) -> Result<Window<B::Element>>
    where
        B: Buffer<Element: Element>,
    {
        self.require_live()?;
        self.register_memory(Ok(buffer.device_slice()), flags)
    }

    /// Registers memory that this rank has, or tells the other ranks why it has none.
    fn register_memory<T: Element>(
        &self,
        memory: Result<DeviceSlice<T>>,
        flags: WindowFlags,
    ) -> Result<Window<T>> {
        let memory = memory.and_then(|slice| {
            self.check_memory(&slice, flags)?;
            Ok(slice)
        });
        let (slice, rank_bytes) = self.gather_sizes(memory, flags)?;
        let number = 1 + self.inner.windows.fetch_add(1, Ordering::AcqRel);
        let inner = Arc::new(Inner {
            handle: Out::new(0),
            state: SharedState::new(),
            life: Lifecycle::default(),
            address: slice.device_address(),
            bytes: slice.byte_len(),
            flags,
            rank_bytes,
            number,
            memory: Mutex::new(slice.keep_alive()),
            communicator: self.clone(),
            created_at: self.context().creation_time(),
        });
        // A deferred call keeps `inner` alive: until the call is made, the registration cannot be
        // ended and the memory cannot be freed.
        self.call_collective(&inner.state, Arc::clone(&inner) as _, |comm| {
            let (address, bytes) = (slice.device_address(), slice.byte_len());
            calls::register_window(comm, address, bytes, flags.bits(), inner.handle.clone())
        })?;
        self.adopt(&inner);
        let window = Window { inner, len: slice.len(), element: PhantomData };
        if window.inner.state.get() == CallState::Made {
            // Without symmetric memory, NCCL reports success and returns no window.
            window.inner.handle()?;
        }
        Ok(window)
    }

    /// Fails unless this rank can register the memory.
    fn check_memory<T: Element>(&self, slice: &DeviceSlice<T>, flags: WindowFlags) -> Result<()> {
        /// NCCL: `NCCL_WIN_REQUIRED_ALIGNMENT`.
        const ALIGNMENT: u64 = 4096;
        self.require_own(slice.context(), "memory for a window")?;
        if slice.is_empty() || !slice.device_address().is_multiple_of(ALIGNMENT) {
            return Err(Error::invalid(format!(
                "a window over {} bytes at {:#x}: it needs at least one element and an address \
                 that is a multiple of {ALIGNMENT}",
                slice.byte_len(),
                slice.device_address()
            )));
        }
        if flags.contains(WindowFlags::COLL_SYMMETRIC)
            && flags.intersects(WindowFlags::GIN_ONLY | WindowFlags::CFT_COUNTED)
        {
            return Err(Error::invalid(
                "COLL_SYMMETRIC excludes GIN_ONLY and CFT_COUNTED in a window's flags",
            ));
        }
        self.context().refuse_capturing("a window is registered")?;
        self.bind()
    }

    /// Returns the memory, and the window's size on each rank, if the ranks can exchange.
    fn gather_sizes<T: Element>(
        &self,
        memory: Result<DeviceSlice<T>>,
        flags: WindowFlags,
    ) -> Result<(DeviceSlice<T>, Option<Vec<u64>>)> {
        if !self.has_peers() {
            return Ok((memory?, None));
        }
        let own = memory.map(|slice| {
            let bytes = slice.byte_len() as u64;
            (slice, bytes)
        });
        let call = self.collective("register_window").option("flags", format!("{flags:?}"));
        call.agree(own).map(|(slice, all)| (slice, Some(all)))
    }
}

impl<T: Element> Window<T> {
    /// Returns the number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of elements on `rank`; `None` for an unknown rank, and for a communicator
    /// without a [`World`](crate::World), whose ranks do not exchange their lengths.
    #[must_use]
    pub fn len_of(&self, rank: usize) -> Option<usize> {
        let bytes = self.inner.rank_bytes.as_ref()?.get(rank)?;
        Some(usize::try_from(*bytes).ok()? / size_of::<T>())
    }

    /// Returns the smallest number of elements on any rank, which is the length that kernels get.
    /// Without a [`World`](crate::World), this rank's number.
    #[must_use]
    pub fn min_len(&self) -> usize {
        let ranks = 0..self.inner.communicator.n_ranks();
        ranks.filter_map(|rank| self.len_of(rank)).min().unwrap_or(self.len)
    }

    /// Returns the number of the window among those of its communicator, from 1, the same on all
    /// ranks.
    #[doc(hidden)]
    #[must_use]
    pub fn number(&self) -> u64 {
        self.inner.number
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.inner.bytes
    }

    /// Returns the device address of this rank's first element.
    #[must_use]
    pub fn device_address(&self) -> u64 {
        self.inner.address
    }

    /// Returns the flags that it was registered with.
    #[must_use]
    pub fn flags(&self) -> WindowFlags {
        self.inner.flags
    }

    /// Returns the communicator it is registered with.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.inner.communicator
    }

    /// Returns whether it is registered: from the end of its group until it is closed.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.handle().is_ok()
    }

    /// Returns the window as a kernel parameter.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`StateError::InGroup`] before the group of the registration has
    /// ended; [`DevCommError::NoWindow`].
    ///
    /// [`DevCommError::NoWindow`]: crate::DevCommError::NoWindow
    /// [`StateError::Closed`]: crate::StateError::Closed
    /// [`StateError::InGroup`]: crate::StateError::InGroup
    pub fn device_window(&self) -> Result<DeviceWindow<T>> {
        self.inner.handle().map(|handle| self.window_of(handle))
    }

    fn window_of(&self, handle: u64) -> DeviceWindow<T> {
        DeviceWindow::new(handle as *mut c_void, self.min_len())
    }

    /// Ends the registration, after waiting for this rank's streams and, if a graph may use the
    /// window, with that graph. Idempotent. The memory stays allocated until the window is dropped,
    /// so that it can be copied.
    ///
    /// NCCL: `ncclCommWindowDeregister`.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams, [`StateError::Capturing`], [`StateError::InGroup`],
    /// [`Error::Nccl`].
    ///
    /// [`StateError::Capturing`]: crate::StateError::Capturing
    /// [`StateError::InGroup`]: crate::StateError::InGroup
    #[doc(alias = "ncclCommWindowDeregister")]
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of a window")?;
        self.inner.close_or_hold()
    }

    /// Copies `data` to this rank's first `data.len()` elements.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::copy_from_host`].
    pub fn copy_from_host(&self, data: &[T]) -> Result<()> {
        self.device_slice().copy_from_host(data)
    }

    /// Copies this rank's first `data.len()` elements to `data`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::copy_to_host`].
    pub fn copy_to_host(&self, data: &mut [T]) -> Result<()> {
        self.device_slice().copy_to_host(data)
    }

    /// Sets every byte of this rank's memory.
    ///
    /// # Errors
    ///
    /// The errors are those of [`DeviceSlice::fill_bytes`].
    pub fn fill_bytes(&self, byte: u8) -> Result<()> {
        self.device_slice().fill_bytes(byte)
    }

    /// Returns NCCL's handle of the window.
    pub(crate) fn handle(&self) -> Result<u64> {
        self.inner.handle()
    }

    /// Returns the window of `comm` that a slice was made from, with elements `T`, and the index in
    /// it of the slice's first element. `None` for memory that is in no window of this
    /// communicator, with whose ranks a kernel would take those of another, or not at a multiple of
    /// `T`'s size.
    #[must_use]
    pub fn containing<U: Element>(
        slice: &DeviceSlice<U>,
        comm: &Communicator,
    ) -> Option<(Self, usize)> {
        let inner = slice.keep_alive()?.downcast::<Inner>().ok()?;
        let index = inner.index_of::<T, U>(slice, comm)?;
        let len = inner.bytes / size_of::<T>();
        Some((Self { inner, len, element: PhantomData }, index))
    }

    /// Returns the index of [`containing`](Self::containing) alone.
    #[must_use]
    pub fn index_of<U: Element>(slice: &DeviceSlice<U>, comm: &Communicator) -> Option<usize> {
        slice.owner()?.downcast_ref::<Inner>()?.index_of::<T, U>(slice, comm)
    }

    /// Returns a reference that keeps the window registered.
    pub(crate) fn keep_alive(&self) -> KeepAlive {
        Arc::clone(&self.inner) as _
    }

    pub(super) fn resource(&self) -> Arc<dyn Resource> {
        Arc::clone(&self.inner) as _
    }
}

/// Returns what keeps the memory of a slice allocated. For a slice of a window this is not the
/// window, which would keep its communicator alive.
pub(super) fn allocation_of<T>(slice: &DeviceSlice<T>) -> Option<KeepAlive> {
    match slice.keep_alive()?.downcast::<Inner>() {
        Ok(window) => window.allocation(),
        Err(owner) => Some(owner),
    }
}

// SAFETY: the memory of an open window is allocated; a drop waits for the streams.
unsafe impl<T: Element> Buffer for Window<T> {
    type Element = T;

    fn device_slice(&self) -> DeviceSlice<T> {
        let context = self.inner.communicator.context();
        // The slice keeps the window registered, and the window keeps the memory allocated.
        DeviceSlice::owned(context, self.inner.address, self.len, self.keep_alive())
    }
}

// SAFETY: the ranks have compared their lengths, or `info` says `unchecked`; a drop waits for the
// streams.
unsafe impl<T: Element> IntoArg<DeviceWindow<T>> for &Window<T> {
    fn into_arg(self) -> DeviceWindow<T> {
        // Another thread that closes it waits for launches that have found it open. Of one that was
        // not open, `info` says so.
        match self.inner.handle_if_registered() {
            Ok(handle) if !self.inner.life.has_ended() => self.window_of(handle),
            _ => DeviceWindow::new(std::ptr::null_mut(), 0),
        }
    }

    fn info(&self) -> ArgInfo<'_> {
        ArgInfo {
            closed: self.inner.handle().is_err().then_some("the window"),
            communicator: Some(self.inner.communicator.id()),
            unchecked: self.inner.rank_bytes.is_none(),
            ..ArgInfo::default()
        }
    }

    fn windows(&self, see: &mut dyn FnMut(Range<u64>)) {
        see(self.inner.address..self.inner.address + self.inner.bytes as u64);
    }
}

impl<T: Element> std::fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (address, len) = (self.inner.address, self.len);
        write!(f, "Window<{}>({address:#x}, {len} elements)", T::NAME)
    }
}
