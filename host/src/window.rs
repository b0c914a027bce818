//! Symmetric windows: memory that the kernels of every rank can reach.

use std::ffi::c_void;
use std::ops::Deref;

use devcomm_types::{Element, IntoArg, Window as DeviceWindow};

use crate::sys::nccl::WindowHandle;
use crate::{Communicator, Error, Memory, Result};

/// Device memory of `len` elements `T`, registered with every rank of a communicator.
///
/// Made by [`Communicator::window`]. A launch takes `&Window<T>` where the kernel has a `Window<T>`. It derefs to its
/// [`Memory`], for the length and for copies.
///
/// Dropped, it first ends the registration and then frees the memory, after waiting for this rank's streams. Both are
/// local: that the kernels of *other* ranks have finished with this window is for a barrier at their end to ensure.
///
/// NCCL: `ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`, `ncclCommWindowDeregister`.
#[doc(alias = "ncclCommWindowRegister")]
#[doc(alias = "ncclWindow_t")]
pub struct Window<T: Element> {
    /// `None` only while dropping.
    handle: Option<WindowHandle>,
    device_handle: *mut c_void,
    memory: Memory<T>,
    communicator: Communicator,
}

impl<T: Element> Window<T> {
    pub(crate) fn new(communicator: &Communicator, memory: Memory<T>) -> Result<Self> {
        let bytes = memory.byte_len();
        let nccl = communicator.library().nccl();
        let handle = nccl.register(communicator.comm()?, memory.allocation()?, bytes)?;
        // NCCL reports success and gives no window where it has no symmetric memory.
        let handle = handle.ok_or(Error::NoWindow { rank: communicator.rank(), bytes })?;
        let device_handle = handle.device_handle();
        Ok(Self { handle: Some(handle), device_handle, memory, communicator: communicator.clone() })
    }

    /// The window as a kernel parameter.
    #[must_use]
    pub fn device_window(&self) -> DeviceWindow<T> {
        DeviceWindow::from_handle(self.device_handle)
    }
}

impl<T: Element> Deref for Window<T> {
    type Target = Memory<T>;

    fn deref(&self) -> &Memory<T> {
        &self.memory
    }
}

impl<T: Element> IntoArg<DeviceWindow<T>> for &Window<T> {
    fn into_arg(self) -> DeviceWindow<T> {
        self.device_window()
    }
}

impl<T: Element> Drop for Window<T> {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        let context = self.memory.context();
        let (Ok(comm), false) = (self.communicator.comm(), context.health().is_lost()) else {
            return self.memory.leak();
        };
        if !context.is_settled("a window") {
            return self.memory.leak();
        }
        let _ = context.cuda().bind();
        // SAFETY: this rank's streams are idle; peers are covered by the contract of the launch.
        let ended = unsafe { self.communicator.library().nccl().deregister(comm, handle) };
        if let Err(error) = ended {
            tracing::warn!("{error}");
            // Memory under a window that would not end is not to be freed.
            self.memory.leak();
        }
    }
}

impl<T: Element> std::fmt::Debug for Window<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Window({:p}, {:?})", self.device_handle, self.memory)
    }
}
