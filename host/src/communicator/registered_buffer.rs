//! Registered buffers: memory that NCCL's collectives use without copying it.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Communicator;
use super::deferred::{CallState, SharedState};
use super::handle::{Handle, Status};
use super::window::allocation_of;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::device::{Buffer, Context, CreationTime, KeepAlive, Lifecycle};
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::call::Out;
use crate::sys::nccl::calls;

/// Memory registered with one communicator, on this rank alone. Where possible, NCCL's collectives
/// use it directly, without internal buffers.
///
/// Created by [`Communicator::register_buffer`]. The communicator owns the registration and keeps
/// the memory allocated, until [`close`](Self::close) or its own end: dropping this handle changes
/// nothing.
///
/// NCCL: `ncclCommRegister`, `ncclCommDeregister`.
#[doc(alias = "ncclCommRegister")]
#[doc(alias = "ncclCommDeregister")]
pub struct RegisteredBuffer {
    inner: Arc<Inner>,
    /// Keeps the communicator, which `inner` does not.
    _communicator: Communicator,
}

/// A registration of memory that the program frees itself; dropping it ends the registration.
///
/// Created by [`Communicator::register_borrowed`].
#[derive(Debug)]
#[must_use = "dropping it ends the registration"]
pub struct BorrowedRegistration(RegisteredBuffer);

/// The communicator may own this value, which therefore does not keep the communicator alive.
struct Inner {
    /// Whether a communicator owns this value.
    is_owned: bool,
    /// NCCL writes it when the call is made, possibly at the end of a group.
    handle: Out<u64>,
    state: SharedState,
    life: Lifecycle,
    bytes: usize,
    communicator: Arc<Handle>,
    context: Context,
    /// Keeps the memory allocated; `None` for memory that the program frees itself.
    memory: Mutex<Option<KeepAlive>>,
    created_at: CreationTime,
}

impl Communicator {
    /// Registers memory for zero-copy collectives, until the communicator ends or the result is
    /// [closed](RegisteredBuffer::close). Each rank registers its own buffers. When the end of a
    /// [`group`](crate::group()) fails, its registrations may have taken effect.
    ///
    /// NCCL: `ncclCommRegister`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for empty memory, memory of another context, or memory that nothing
    /// keeps allocated, as a slice [from raw parts](crate::DeviceSlice::from_raw_parts): see
    /// [`register_borrowed`](Self::register_borrowed). [`StateError::Capturing`],
    /// [`StateError::CommunicatorEnded`], [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`Error::Nccl`].
    pub fn register_buffer<B: Buffer>(&self, buffer: &B) -> Result<RegisteredBuffer> {
        let memory = allocation_of(&buffer.device_slice());
        let memory = memory.ok_or_else(|| {
            Error::invalid(
                "the program frees this memory itself: register it with register_borrowed, and \
                 drop the result before",
            )
        })?;
        let is_owned = true;
        let registered = self.register(buffer, Some(memory), is_owned)?;
        self.own(&registered.inner);
        Ok(registered)
    }

    /// Does the same as [`register_buffer`](Self::register_buffer), for memory that the program
    /// frees itself: the registration ends when the result is dropped, which must happen before
    /// that.
    ///
    /// # Errors
    ///
    /// The errors are those of [`register_buffer`](Self::register_buffer), which refuses such
    /// memory.
    pub fn register_borrowed<B: Buffer>(&self, buffer: &B) -> Result<BorrowedRegistration> {
        let memory = allocation_of(&buffer.device_slice());
        let is_owned = false;
        let registered = self.register(buffer, memory, is_owned)?;
        self.adopt(&registered.inner);
        Ok(BorrowedRegistration(registered))
    }

    fn register<B: Buffer>(
        &self,
        buffer: &B,
        memory: Option<KeepAlive>,
        is_owned: bool,
    ) -> Result<RegisteredBuffer> {
        let slice = buffer.device_slice();
        self.require_own(slice.context(), "memory to be registered")?;
        if slice.is_empty() {
            return Err(Error::invalid("a registration of 0 elements"));
        }
        self.context().refuse_capturing("a buffer is registered")?;
        let inner = Arc::new(Inner {
            is_owned,
            handle: Out::new(0),
            state: SharedState::new(),
            life: Lifecycle::default(),
            bytes: slice.byte_len(),
            communicator: Arc::clone(self.handle()),
            context: self.context().clone(),
            memory: Mutex::new(memory),
            created_at: self.context().creation_time(),
        });
        // A deferred call keeps `inner` alive: until the call is made, the registration cannot be
        // ended and the memory cannot be freed.
        self.call_collective(&inner.state, Arc::clone(&inner) as _, |comm| {
            let (address, bytes) = (slice.device_address(), slice.byte_len());
            calls::register_buffer(comm, address, bytes, inner.handle.clone())
        })?;
        Ok(RegisteredBuffer { inner, _communicator: self.clone() })
    }
}

impl RegisteredBuffer {
    /// Returns the size in bytes.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.inner.bytes
    }

    /// Returns NCCL's handle of the registration. It may be 0 for memory that NCCL cannot use
    /// without a copy.
    ///
    /// # Errors
    ///
    /// [`StateError::Closed`]; [`StateError::InGroup`] before the group of the registration has
    /// ended.
    pub fn handle(&self) -> Result<u64> {
        self.inner.handle()
    }

    /// Returns whether it is registered.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.handle().is_ok()
    }

    /// Ends the registration and releases the memory, after waiting for this rank's streams or, if
    /// a graph may use the registration, with that graph. Idempotent.
    ///
    /// The registration of memory that the program frees itself ends at once: graphs that may use
    /// it must not be launched any more.
    ///
    /// NCCL: `ncclCommDeregister`.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams, [`StateError::Capturing`], [`StateError::InGroup`],
    /// [`Error::Nccl`].
    pub fn close(&self) -> Result<()> {
        refuse_inside("the end of a registration")?;
        self.inner.close_or_hold()
    }
}

impl Deref for BorrowedRegistration {
    type Target = RegisteredBuffer;

    fn deref(&self) -> &RegisteredBuffer {
        &self.0
    }
}

impl Inner {
    fn handle(&self) -> Result<u64> {
        self.communicator.refuse_suspended()?;
        self.handle_if_open()
    }

    /// Returns the handle, also while the communicator is suspended.
    fn handle_if_open(&self) -> Result<u64> {
        self.require_open(self.communicator.rank())?;
        self.handle_if_registered()
    }

    /// Returns whether the call was successful. It takes effect at once in an NCCL group, which may
    /// fail afterwards.
    fn is_registered(&self) -> bool {
        match self.state.get() {
            CallState::Made => true,
            CallState::Failed => self.handle.get() != 0,
            CallState::Deferred => false,
        }
    }

    /// Returns the handle, also while another thread closes it.
    fn handle_if_registered(&self) -> Result<u64> {
        let rank = self.communicator.rank();
        match self.state.get() {
            CallState::Made | CallState::Failed
                if self.is_registered() && self.communicator.status() < Status::Destroyed =>
            {
                Ok(self.handle.get())
            }
            CallState::Deferred => {
                Err(StateError::InGroup { what: "the use of a buffer that the group registers" }
                    .into())
            }
            _ => Err(StateError::Closed { what: self.name(), rank }.into()),
        }
    }

    /// Returns the same registration, for a graph, with the memory.
    fn held(&self) -> Self {
        Self {
            is_owned: false,
            handle: self.handle.clone(),
            state: self.state.clone(),
            life: Lifecycle::default(),
            bytes: self.bytes,
            communicator: Arc::clone(&self.communicator),
            context: self.context.clone(),
            memory: Mutex::new(self.memory.lock().take()),
            created_at: self.created_at,
        }
    }
}

impl Resource for Inner {
    fn name(&self) -> &'static str {
        "the registered buffer"
    }

    fn is_open(&self) -> bool {
        self.life.is_open() && (self.state.get() == CallState::Deferred || self.is_registered())
    }

    fn close(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let Some(ending) = self.life.begin_end(&self.context)? else { return Ok(()) };
        let handle = match self.handle_if_registered() {
            Ok(handle) => handle,
            // The group of another thread registers it.
            Err(deferred) if self.state.get() == CallState::Deferred => return Err(deferred),
            Err(_) => {
                // The registration failed, or has ended with its communicator.
                ending.done();
                let memory = self.memory.lock().take();
                drop(memory);
                return Ok(());
            }
        };
        self.context.refuse_capturing("a registration is ended")?;
        self.context.drain()?;
        self.context.bind_to_free();
        let ended = match handle {
            0 => Ok(()),
            _ => self.communicator.release(|comm| calls::deregister_buffer(comm, handle)),
        };
        ending.done();
        let memory = self.memory.lock().take();
        if ended.is_err() {
            // NCCL may still use the memory.
            std::mem::forget(memory);
        }
        ended
    }

    fn close_or_hold(&self) -> Result<()> {
        self.communicator.refuse_suspended()?;
        let Some(ending) = self.life.begin_end(&self.context)? else { return Ok(()) };
        let mut is_held = false;
        if self.handle_if_registered().is_ok() && self.memory.lock().is_some() {
            self.context.refuse_capturing("a registration is ended")?;
            is_held = self.context.hold(self.created_at, || self.held());
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
        // An owned buffer is still registered only if its communicator could not end it.
        let ends = !self.is_owned && self.communicator.refuse_suspended().is_ok();
        // Memory that the program frees itself may be freed after this drop, so that its
        // registration is not kept for a graph or for later.
        let has_memory = self.memory.get_mut().is_some();
        let what = "a registration";
        let can_free = || match has_memory {
            true => self.context.can_free_or_hold(what, self.created_at, || self.held()),
            false => self.context.can_free(what),
        };
        if !ends || !can_free() {
            std::mem::forget(self.memory.lock().take());
        } else if let Err(error) = self.close() {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for RegisteredBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegisteredBuffer({} bytes)", self.inner.bytes)
    }
}
