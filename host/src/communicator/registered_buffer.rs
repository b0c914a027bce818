//! Registered buffers: memory that NCCL's collectives use without copying it.

use std::any::Any;
use std::cell::Cell;
use std::rc::Rc;

use super::Communicator;
use super::group::CallState;
use crate::device::Buffer;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

/// Memory registered with one communicator, on this rank alone. Where possible, NCCL's collectives
/// use it directly, without internal buffers.
///
/// Created by [`Communicator::register_buffer`]; closed by [`close`](Self::close), with the
/// communicator, or when dropped.
///
/// NCCL: `ncclCommRegister`, `ncclCommDeregister`.
#[doc(alias = "ncclCommRegister")]
#[doc(alias = "ncclCommDeregister")]
pub struct RegisteredBuffer {
    inner: Rc<Inner>,
}

struct Inner {
    handle: Out<u64>,
    state: Rc<Cell<CallState>>,
    closed: Cell<bool>,
    bytes: usize,
    communicator: Communicator,
    memory: Cell<Option<Rc<dyn Any>>>,
}

impl Communicator {
    /// Registers memory for zero-copy collectives. Each rank registers its own buffers.
    ///
    /// NCCL: `ncclCommRegister`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for empty memory or memory of another context;
    /// [`StateError::Capturing`], [`StateError::CommunicatorEnded`],
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), [`Error::Nccl`].
    pub fn register_buffer<B: Buffer>(&self, buffer: &B) -> Result<RegisteredBuffer> {
        let slice = buffer.device_slice();
        self.require_own(slice.context(), "memory to be registered")?;
        if slice.is_empty() {
            return Err(Error::invalid("a registration of 0 elements"));
        }
        self.context().refuse_capturing("a buffer is registered")?;
        let inner = Rc::new(Inner {
            handle: Out::new(0),
            state: Rc::new(Cell::new(CallState::Deferred)),
            closed: Cell::new(false),
            bytes: slice.byte_len(),
            communicator: self.clone(),
            memory: Cell::new(slice.keep()),
        });
        // A deferred call keeps `inner` alive: until the call is made, the registration cannot be
        // ended and the memory cannot be freed.
        self.call_collective(&inner.state, Rc::clone(&inner) as _, |comm| {
            let (address, bytes) = (slice.device_address(), slice.byte_len());
            calls::register_buffer(comm, address, bytes, inner.handle.clone())
        })?;
        self.adopt(&inner);
        Ok(RegisteredBuffer { inner })
    }
}

impl RegisteredBuffer {
    /// Size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.inner.bytes
    }

    /// NCCL's handle of the registration. It may be 0 for memory that NCCL cannot use without a
    /// copy.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`StateError::InGroup`] before the group of the registration has
    /// ended.
    pub fn handle(&self) -> Result<u64> {
        self.inner.handle()
    }

    /// Whether it is registered.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.handle().is_ok()
    }

    /// Ends the registration, after waiting for this rank's streams. Idempotent.
    ///
    /// NCCL: `ncclCommDeregister`.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams, [`StateError::Capturing`], [`StateError::InGroup`],
    /// [`Error::Nccl`].
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of a registration")?;
        self.inner.close()
    }
}

impl Inner {
    fn handle(&self) -> Result<u64> {
        self.communicator.refuse_suspended()?;
        self.registered()
    }

    /// The handle, also while the communicator is suspended.
    fn registered(&self) -> Result<u64> {
        let rank = self.communicator.rank();
        match self.state.get() {
            CallState::Made if !self.closed.get() && self.communicator.is_valid() => {
                Ok(self.handle.get())
            }
            CallState::Deferred => {
                Err(StateError::InGroup { what: "the use of a buffer that the group registers" }
                    .into())
            }
            _ => Err(StateError::Closed { what: "the registered buffer", rank }.into()),
        }
    }
}

impl Resource for Inner {
    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let Ok(handle) = self.handle() else {
            // The registration failed, or has ended already.
            self.closed.set(true);
            return Ok(());
        };
        let context = self.communicator.context();
        context.refuse_capturing("a registration is ended")?;
        context.drain()?;
        self.closed.set(true);
        let _ = context.cuda().bind();
        if handle == 0 {
            return Ok(());
        }
        let ended = self.communicator.release(|comm| calls::deregister_buffer(comm, handle));
        if ended.is_err() {
            std::mem::forget(self.memory.take());
        }
        ended
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.registered().is_err() {
            return;
        }
        let suspended = self.communicator.refuse_suspended().is_err();
        if suspended || !self.communicator.context().can_free("a registered buffer") {
            std::mem::forget(self.memory.take());
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for RegisteredBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegisteredBuffer({} bytes)", self.inner.bytes)
    }
}
