//! The registration of a window: made once, and ended once.

use parking_lot::Mutex;

use super::Inner;
use crate::communicator::deferred::CallState;
use crate::device::issuer::Resource;
use crate::device::{KeepAlive, Lifecycle};
use crate::error::{DevCommError, Result, StateError};
use crate::sys::nccl::calls;

impl Inner {
    /// Returns NCCL's handle; fails unless window and communicator can be used.
    pub(super) fn handle(&self) -> Result<u64> {
        let handle = self.handle_if_open()?;
        self.communicator.require_live()?;
        Ok(handle)
    }

    /// Returns the handle, also while the communicator is suspended or revoked.
    pub(super) fn handle_if_open(&self) -> Result<u64> {
        let rank = self.communicator.rank();
        if !self.life.is_open() {
            return Err(StateError::Closed { what: self.name(), rank }.into());
        }
        self.handle_if_registered()
    }

    /// Returns the handle, also while another thread closes the window.
    pub(super) fn handle_if_registered(&self) -> Result<u64> {
        let rank = self.communicator.rank();
        if self.state.get() == CallState::Failed || !self.communicator.is_valid() {
            return Err(StateError::Closed { what: self.name(), rank }.into());
        }
        if self.state.get() == CallState::Deferred {
            return Err(StateError::InGroup {
                what: "the use of a window that the group registers",
            }
            .into());
        }
        // A call that was made is complete, also for a non-blocking communicator.
        match self.handle.get() {
            0 => Err(DevCommError::NoWindow { rank, bytes: self.bytes }.into()),
            handle => Ok(handle),
        }
    }

    /// Returns what keeps the memory allocated, without the registration.
    pub(super) fn allocation(&self) -> Option<KeepAlive> {
        self.memory.lock().clone()
    }

    /// Returns the same registration, to be dropped later than `self`, which has ended with this.
    fn moved(&self) -> Self {
        let memory = self.memory.lock().take();
        self.registration(self.life.take(), memory)
    }

    /// Returns another handle of the registration. The caller ends `self`, so that the registration
    /// is ended once.
    fn registration(&self, life: Lifecycle, memory: Option<KeepAlive>) -> Self {
        Self {
            handle: self.handle.clone(),
            state: self.state.clone(),
            life,
            address: self.address,
            bytes: self.bytes,
            flags: self.flags,
            rank_bytes: None,
            number: self.number,
            memory: Mutex::new(memory),
            communicator: self.communicator.clone(),
            created_at: self.created_at,
        }
    }

    /// Leaks the memory: a GPU may still use it.
    fn leak(&self) {
        std::mem::forget(self.memory.lock().take());
    }
}

impl Resource for Inner {
    fn name(&self) -> &'static str {
        "the window"
    }

    fn is_open(&self) -> bool {
        self.life.is_open() && self.state.get() != CallState::Failed
    }

    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let communicator = &self.communicator;
        let context = communicator.context();
        let Some(ending) = self.life.begin_end(context)? else { return Ok(()) };
        let handle = match self.handle_if_registered() {
            Ok(handle) => handle,
            // The group of another thread registers it.
            Err(deferred) if self.state.get() == CallState::Deferred => return Err(deferred),
            Err(_) => {
                // The registration failed, or has ended with its communicator.
                ending.done();
                return Ok(());
            }
        };
        let may_peers_access_forever = || communicator.handle().may_peers_access_forever();
        if !may_peers_access_forever() {
            context.refuse_capturing("a window is closed")?;
            context.drain()?;
        }
        // Also if an abort has ended kernels during the wait.
        if may_peers_access_forever() {
            ending.done();
            let deregister = move |comm| calls::deregister_window(comm, handle);
            communicator.handle().keep_until_end(self.allocation(), deregister);
            return Ok(());
        }
        context.bind_to_free();
        // This rank's streams are idle; that peers are done is part of the contract of launches.
        let ended = communicator.release(|comm| calls::deregister_window(comm, handle));
        ending.done();
        if ended.is_err() {
            // NCCL may still use the memory.
            self.leak();
        }
        ended
    }

    fn close_or_hold(&self) -> Result<()> {
        let context = self.communicator.context();
        let Some(ending) = self.life.begin_end(context)? else { return Ok(()) };
        let mut is_held = false;
        if self.handle_if_registered().is_ok() {
            context.refuse_capturing("a window is closed")?;
            let moved = || self.registration(Lifecycle::default(), self.allocation());
            is_held = context.hold(self.created_at, moved);
        }
        if is_held {
            ending.done();
            return Ok(());
        }
        drop(ending);
        self.close()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.life.set_unused();
        if self.handle_if_open().is_err() {
            return;
        }
        let context = self.communicator.context().clone();
        let suspended = self.communicator.refuse_suspended().is_err();
        // Memory of another library may be freed after this drop, so that its registration is not
        // kept for a graph or for later.
        let can_free = || match self.allocation().is_some() {
            true => context.can_free_or_hold("a window", self.created_at, || self.moved()),
            false => context.can_free("a window"),
        };
        if suspended || !can_free() {
            return self.leak();
        }
        if let Err(error) = self.close() {
            tracing::warn!("{error}");
        }
    }
}
