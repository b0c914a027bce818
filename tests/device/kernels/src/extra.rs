//! What every kernel here takes.

use bytemuck::{Pod, Zeroable};
use devcomm_types::kernel::KernelParam;
use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, ResourceHandle};
use devcomm_types::{CounterRange, SignalRange};
use nccl_device::{Coop, DevComm, Window};

/// A window of words.
pub type Words = Window<u64>;

/// The parameters of every kernel.
pub type Args = (DevComm, Words, Words, Extra, u32);

/// Handles of what a test asked for beside the device communicator's own; zeros for the rest.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Extra {
    /// A buffer among the resources.
    pub buffer: ResourceHandle,
    /// Not used; keeps the size a multiple of 8.
    pub unused: u32,
    /// Barriers of the LSA team.
    pub lsa: LsaBarrierHandle,
    /// Barriers of the world over the network.
    pub gin: GinBarrierHandle,
    /// Room for LL all-to-all.
    pub ll: LlA2aHandle,
    /// Signals.
    pub signals: Range,
    /// Counters.
    pub counters: Range,
}

/// Signals or counters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Range {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl Extra {
    /// The signals as the API has them.
    #[inline(always)]
    pub fn signals(&self) -> SignalRange {
        SignalRange { first: self.signals.first, count: self.signals.count }
    }

    /// The counters as the API has them.
    #[inline(always)]
    pub fn counters(&self) -> CounterRange {
        CounterRange { first: self.counters.first, count: self.counters.count }
    }
}

/// The calling thread's share of `0..count`, which the threads of `coop` divide among themselves.
#[inline(always)]
pub(crate) fn share(coop: Coop, count: usize) -> impl Iterator<Item = usize> {
    (coop.thread_rank() as usize..count).step_by(coop.size() as usize)
}

// SAFETY: one type, one layout.
unsafe impl KernelParam for Extra {
    type Abi = Self;
}
