//! Memory orders, with NCCL's values.

use cuda_std::atomic::{Order, Scope, fence};

/// The memory order of a barrier or a wait. NCCL: `cuda::memory_order`.
#[doc(alias = "memory_order")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum MemoryOrder {
    /// Orders no other accesses.
    Relaxed = 0,
    /// The peers' earlier writes are visible afterwards: for the barrier at a kernel's start.
    Acquire = 2,
    /// This rank's earlier writes are visible to peers that acquire: for the barrier at a kernel's
    /// end.
    Release = 3,
    /// Acquire and release: for a barrier between two steps of a kernel.
    AcqRel = 4,
    /// Acquire and release, in one total order.
    SeqCst = 5,
}

impl MemoryOrder {
    /// Returns whether this order has release semantics.
    pub(crate) const fn releases(self) -> bool {
        matches!(self, Self::Release | Self::AcqRel | Self::SeqCst)
    }

    /// Returns the order of a load that ends a wait. With [`Self::SeqCst`] only the fence
    /// [before the arrival](Self::fence_before_arrival) is sequentially consistent.
    pub(crate) const fn of_load(self) -> Order {
        match self {
            Self::Acquire | Self::AcqRel | Self::SeqCst => Order::Acquire,
            Self::Relaxed | Self::Release => Order::Relaxed,
        }
    }

    /// Returns the acquire half, which a wait needs.
    pub(crate) const fn acquire_half(self) -> Self {
        match self {
            Self::Relaxed | Self::Release => Self::Relaxed,
            Self::Acquire | Self::AcqRel => Self::Acquire,
            Self::SeqCst => Self::SeqCst,
        }
    }

    /// Returns this order, plus release semantics if `earlier` has them.
    pub(crate) const fn and_release_of(self, earlier: Self) -> Self {
        match self {
            Self::Relaxed if earlier.releases() => Self::Release,
            Self::Acquire if earlier.releases() => Self::AcqRel,
            _ => self,
        }
    }

    /// Executes the fence before an arrival, at system scope.
    #[track_caller]
    pub(crate) fn fence_before_arrival(self) {
        match self {
            Self::Relaxed | Self::Acquire => {}
            Self::Release | Self::AcqRel => fence(Order::AcqRel, Scope::Sys),
            Self::SeqCst => fence(Order::SeqCst, Scope::Sys),
        }
    }
}
