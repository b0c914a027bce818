//! [`CommResource`], the trait of all resources of a communicator, and how all are closed at once.

use devcomm_types::Element;

use super::comm::Inner;
use super::{
    BorrowedRegistration, Communicator, CustomReduceOp, DevCommResource, RegisteredBuffer, Window,
};
use crate::device::in_group::refuse_inside;
use crate::error::Result;

/// A resource of a communicator: a window, a device communicator, a registered buffer or an
/// operator. It ends when it is closed, and with its communicator.
///
/// A window, a device communicator and an operator are of use only through their handle: they are
/// also closed when it is dropped. A [`RegisteredBuffer`] is owned by its communicator instead.
///
/// ```no_run
/// use devcomm_host::{CommResource, Communicator, DevCommRequirements, Result};
///
/// fn f(comm: &Communicator) -> Result<()> {
///     let window = comm.window::<f32>(1024)?;
///     let dev = comm.create_dev_comm(DevCommRequirements::new())?;
///     let all: [&dyn CommResource; 2] = [&window, &dev];
///     all.iter().rev().try_for_each(|resource| resource.close())
/// }
/// ```
pub trait CommResource: sealed::Sealed + Send + Sync {
    /// Ends it, after waiting for this rank's streams if they may use it. Idempotent.
    ///
    /// # Errors
    ///
    /// Those of the type's own `close`.
    fn close(&self) -> Result<()>;

    /// Returns whether it can be used: from the end of its group, if it was made in one, until it
    /// is closed or its communicator has ended.
    fn is_valid(&self) -> bool;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! resources {
    ($( $type:ty $(, $param:ident: $bound:path)?; )*) => { $(
        impl $(<$param: $bound>)? sealed::Sealed for $type {}

        impl $(<$param: $bound>)? CommResource for $type {
            fn close(&self) -> Result<()> {
                self.close()
            }

            fn is_valid(&self) -> bool {
                self.is_valid()
            }
        }
    )* };
}

resources! {
    Window<T>, T: Element;
    CustomReduceOp<T>, T: Element;
    DevCommResource;
    RegisteredBuffer;
}

impl sealed::Sealed for BorrowedRegistration {}

impl CommResource for BorrowedRegistration {
    fn close(&self) -> Result<()> {
        RegisteredBuffer::close(self)
    }

    fn is_valid(&self) -> bool {
        RegisteredBuffer::is_valid(self)
    }
}

impl Communicator {
    /// Closes what was created from the communicator and is still open: windows, registered
    /// buffers, operators, device communicators and graphs of its operations, newest first, after
    /// waiting for this rank's streams. What another graph may use ends with that graph. The
    /// communicator can still be used.
    ///
    /// # Errors
    ///
    /// Those of waiting for the streams,
    /// [`StateError::Capturing`](crate::StateError::Capturing),
    /// [`StateError::InGroup`](crate::StateError::InGroup), and
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded) while it is
    /// suspended: then nothing is closed. The first error of NCCL, after closing the others.
    pub fn close_all(&self) -> Result<()> {
        refuse_inside("the end of resources")?;
        self.refuse_suspended()?;
        self.context().synchronize_streams()?;
        self.context().free_postponed();
        // Taken first: what a graph gets is added to the list.
        let resources = std::mem::take(&mut *self.inner.resources.lock());
        Inner::close_each(resources.into_iter().rev(), |resource| resource.close_or_hold())
    }
}
