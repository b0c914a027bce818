//! Memory orders, by NCCL's numbers.

use cuda_std::atomic::{Order, Scope, fence};

/// What a barrier or a wait orders. NCCL: `cuda::memory_order`.
#[doc(alias = "memory_order")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum MemoryOrder {
    /// Nothing: the ranks have arrived.
    Relaxed = 0,
    /// What peers wrote in earlier kernels is visible after it: the barrier at a kernel's start.
    Acquire = 2,
    /// What this rank wrote is complete before a peer passes: the barrier at a kernel's end.
    Release = 3,
    /// Both: data is exchanged within a kernel.
    AcqRel = 4,
    /// Both, in one total order.
    SeqCst = 5,
}

impl MemoryOrder {
    /// Whether it has release semantics.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) const fn releases(self) -> bool {
        matches!(self, Self::Release | Self::AcqRel | Self::SeqCst)
    }

    /// The order of a load that ends a wait.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) const fn of_load(self) -> Order {
        match self {
            Self::Acquire | Self::AcqRel | Self::SeqCst => Order::Acquire,
            Self::Relaxed | Self::Release => Order::Relaxed,
        }
    }

    /// The acquire half, which a wait needs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) const fn acquire_half(self) -> Self {
        match self {
            Self::Relaxed | Self::Release => Self::Relaxed,
            Self::Acquire | Self::AcqRel => Self::Acquire,
            Self::SeqCst => Self::SeqCst,
        }
    }

    /// This order, and what an earlier one releases.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) const fn and_release_of(self, earlier: Self) -> Self {
        match self {
            Self::Relaxed if earlier.releases() => Self::Release,
            Self::Acquire if earlier.releases() => Self::AcqRel,
            _ => self,
        }
    }

    /// The fence before an arrival, for all GPUs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn fence_before_arrival(self) {
        match self {
            Self::Relaxed | Self::Acquire => {}
            Self::Release | Self::AcqRel => fence(Order::AcqRel, Scope::Sys),
            Self::SeqCst => fence(Order::SeqCst, Scope::Sys),
        }
    }
}
