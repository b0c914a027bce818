//! GIN: puts, gets and signals over the network, started by a kernel.
//!
//! A [`Gin`] is one context of a device communicator: a queue to every connected peer, with its own
//! signals and counters. An operation is posted and completes asynchronously. Four mechanisms show
//! its progress:
//!
//! * a *signal* of the peer, which the put updates after its data has arrived ([`Put::signal`],
//!   [`Gin::wait_signal`]);
//! * a *counter* of this rank, which the put increments after its source has been read
//!   ([`Put::counter`], [`Gin::wait_counter`]);
//! * a *flush*, after which the sources of puts can be written and the targets of gets can be read
//!   ([`Gin::flush`]);
//! * a GIN barrier with a fence ([`GinBarrier`](crate::GinBarrier)).
//!
//! # Back ends
//!
//! `Gin<B>` is for one [`GinBackend`]. A kernel is generic over it, `#[kernel(B = gin)]`: it is
//! compiled once per back end, and the launch selects the device communicator's. NCCL's code for
//! another back end would corrupt memory.
//!
//! # Safety model
//!
//! Operations that move data are `unsafe`: the elements must lie in the windows, and nothing else
//! may access them until one of the four mechanisms shows completion. Signals and counters are
//! safe: at worst a kernel waits until the host aborts it. Their ids come from the host or are
//! checked against the ids that the host reserved.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::gin::GinBackend;
//! use nccl_device::{Coop, DevComm, MemoryOrder, Window};
//!
//! /// Each rank puts `count` elements of `source` to the next rank, and waits for those of the
//! /// previous rank.
//! ///
//! /// # Safety
//! ///
//! /// Both windows have `count` elements, and one block of the kernel runs on every rank.
//! #[kernel(B = gin)]
//! pub unsafe fn shift<B: GinBackend>(
//!     comm: DevComm,
//!     target: Window<f32>,
//!     source: Window<f32>,
//!     count: usize,
//! ) {
//!     let (world, coop) = (comm.world_team(), Coop::cta());
//!     let gin = comm.gin::<B>(0);
//!     let arrived = comm.signal(0);
//!     // The previous rank's put increments the signal, perhaps before this line. So the wait is
//!     // for the shadow, the expected value, and not relative to the signal's current value.
//!     if coop.thread_rank() == 0 {
//!         gin.expect(arrived, 1);
//!     }
//!     // SAFETY: the kernel's contract; the target is read only after the signal.
//!     let put = unsafe { gin.put(world, world.next(), target.at(0), source.at(0), count) };
//!     put.signal(arrived.inc()).post(coop);
//!     gin.wait_signal_meets_shadow(coop, arrived, MemoryOrder::Acquire);
//!     gin.flush(coop, MemoryOrder::Relaxed);
//! }
//! ```

mod backend;
pub(crate) mod calls;
mod post;
mod signal;
mod wait;

use crate::prelude::*;
use core::marker::PhantomData;

use devcomm_types::{CounterRange, SignalRange};

pub use backend::{EfaGda, Gdaki, GinBackend, Gpi, Proxy};
use calls::Context;
pub use post::{Get, Put, PutValue};
pub use signal::{CounterId, Signal, SignalAction, SignalId, VaSignal};
pub use wait::Request;

/// The threads that may use a GIN context concurrently. NCCL synchronises them by atomics, of which
/// it needs fewer for fewer threads.
///
/// NCCL: `ncclGinResourceSharingMode`.
#[doc(alias = "ncclGinResourceSharingMode")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ResourceSharing {
    /// Any thread of the GPU.
    Gpu = 0,
    /// Only the threads of this block.
    Cta = 1,
    /// Only this thread.
    Thread = 2,
}

/// One context of a device communicator, over back end `B`.
///
/// NCCL: `ncclGin`.
#[doc(alias = "ncclGin")]
#[derive(Clone, Copy)]
pub struct Gin<'a, B> {
    pub(crate) comm: &'a DevComm,
    pub(crate) index: u32,
    sharing: ResourceSharing,
    backend: PhantomData<B>,
}

#[track_callers]
impl DevComm {
    /// Returns context `index`, shared by all threads of the GPU. Traps unless `index` is below
    /// [`n_gin_contexts`](Self::n_gin_contexts).
    pub fn gin<B: GinBackend>(&self, index: u32) -> Gin<'_, B> {
        let raw = self.as_raw();
        assert!(index < raw.gin_context_count, "the device communicator has no such GIN context");
        // A launch of a kernel that is generic over `B` takes the instance for the device
        // communicator's back end. A kernel that names another `B` is stopped here: NCCL's code for
        // it would corrupt memory. Contexts take the connections in turn. There are one to four of
        // these if there are contexts; the clamp tells the compiler so.
        let connection = index as usize % usize::from(raw.gin_connection_count).clamp(1, 4);
        let back_end = i32::from(raw.gin_net_device_types[connection]);
        assert!(back_end == B::TYPE.raw(), "the device communicator's GIN is of another back end");
        Gin { comm: self, index, sharing: ResourceSharing::Gpu, backend: PhantomData }
    }

    /// Returns signal `index` of those that the host requested with `gin_signals`. Traps if there
    /// is no such signal: higher ids are those of barriers and resources. ([`SignalId::of`] takes
    /// the ranges of resources.)
    pub fn signal(&self, index: u32) -> SignalId {
        let count = self.as_raw().requested_signals.into();
        assert!(index < count, "signal {index}: the host requested {count} by gin_signals");
        // SAFETY: NCCL gives the requested signals the lowest ids.
        unsafe { SignalId::of(self, SignalRange { first: 0, count }, index) }
    }

    /// Returns counter `index` of those that the host requested with `gin_counters`. Traps if there
    /// is no such counter.
    pub fn counter(&self, index: u32) -> CounterId {
        let count = self.as_raw().requested_counters.into();
        assert!(index < count, "counter {index}: the host requested {count} by gin_counters");
        // SAFETY: NCCL gives the requested counters the lowest ids.
        unsafe { CounterId::of(self, CounterRange { first: 0, count }, index) }
    }
}

impl<'a, B: GinBackend> Gin<'a, B> {
    /// Returns the same context with a promise that only some threads use it, for which NCCL needs
    /// less synchronisation.
    ///
    /// # Safety
    ///
    /// While this value or a copy of it is in use, only the threads of `sharing` use the context.
    /// So no other kernel uses it, and no other device communicator, which the host ensures by
    /// `DevCommRequirements::gin_exclusive_contexts`.
    pub unsafe fn shared_by(self, sharing: ResourceSharing) -> Self {
        Self { sharing, ..self }
    }

    /// Returns the device communicator.
    pub fn comm(&self) -> &'a DevComm {
        self.comm
    }

    /// Returns the index of this context in the device communicator.
    pub fn context_index(&self) -> u32 {
        self.index
    }

    /// Returns context `index` of the same device communicator, which the caller knows to exist.
    /// The promise of [`shared_by`](Self::shared_by) is not about other contexts.
    pub(crate) fn with_index(self, index: u32) -> Self {
        let sharing = if index == self.index { self.sharing } else { ResourceSharing::Gpu };
        Self { index, sharing, ..self }
    }

    pub(crate) fn context(&self) -> Context<'a> {
        Context { comm: self.comm, index: self.index, sharing: self.sharing as u8 }
    }

    /// Returns the world rank of rank `peer` of `team`. Traps if GIN does not connect the two
    /// ranks, since NCCL would use a queue that does not exist. With a stride `s` it connects ranks
    /// whose numbers are equal modulo `s`: a rail, if `s` is the size of the LSA teams.
    #[track_caller]
    pub(crate) fn connected(&self, team: Team, peer: i32) -> i32 {
        let (rank, stride) = (self.world_rank(team, peer), self.comm.gin_stride());
        let exists = (rank as u32) < self.comm.n_ranks() as u32;
        let reaches = stride == 1 || rank % stride == self.comm.rank() % stride;
        assert!(exists && reaches, "the peer is not connected");
        rank
    }

    /// Returns the world rank of rank `peer` of `team`, which NCCL's functions take.
    pub(crate) fn world_rank(&self, team: Team, peer: i32) -> i32 {
        team.to_world(self.comm.rank(), peer)
    }
}
