//! A rank before it is connected.

use std::ffi::c_int;
use std::ptr::null_mut;

use devcomm_rma_loopback::abi::{HANDLE_BYTES, Opaque, Status};
use devcomm_rma_loopback::ncclRmaPlugin_v16;

use super::ok;

/// A listening rank and its handle, until [`Rank::connect`](super::Rank::connect).
pub struct Listening {
    pub(super) ctx: Opaque,
    comm: Opaque,
    pub handle: [u8; HANDLE_BYTES],
}

// SAFETY: one thread at a time uses a listening rank.
unsafe impl Send for Listening {}

/// Calls the plugin as NCCL does until it listens.
pub fn listen() -> Listening {
    let plugin = &ncclRmaPlugin_v16;
    let (mut first, mut ctx, mut comm) = (null_mut(), null_mut(), null_mut());
    let mut handle = [0; HANDLE_BYTES];
    let mut devices = 0;
    // SAFETY: the arguments follow the interface, here and below.
    unsafe {
        // NCCL calls it once for the RMA plugin, and once for the GIN proxy.
        ok((plugin.init)(&raw mut first, 1, None));
        ok((plugin.init)(&raw mut ctx, 1, None));
        ok((plugin.devices)(&raw mut devices));
        ok((plugin.listen)(ctx, 0, handle.as_mut_ptr().cast(), &raw mut comm));
        ok((plugin.finalize)(first));
    }
    assert!(devices >= 1);
    Listening { ctx, comm, handle }
}

impl Listening {
    /// Calls `connect`; returns its status.
    pub fn connect(&self, handles: &mut [[u8; HANDLE_BYTES]], rank: usize) -> (Status, Opaque) {
        let mut pointers: Vec<Opaque> =
            handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let ranks = pointers.len() as c_int;
        let mut comm = null_mut();
        // SAFETY: the plugin returned these pointers, and nothing is closed yet.
        let status = unsafe {
            (ncclRmaPlugin_v16.connect)(
                null_mut(), // not the `ctx` from `init`, as in NCCL's RMA proxy
                pointers.as_mut_ptr(),
                ranks,
                rank as c_int,
                self.comm,
                &raw mut comm,
            )
        };
        (status, comm)
    }

    pub fn close(&self) {
        // SAFETY: the plugin returned the pointer, and the listener is not used again.
        unsafe { ok((ncclRmaPlugin_v16.close_listen)(self.comm)) };
    }
}
