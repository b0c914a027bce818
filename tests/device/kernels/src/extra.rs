//! The parameters of the test kernels.

use bytemuck::{Pod, Zeroable};
use devcomm_types::kernel::KernelParam;
use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, ResourceHandle};
use devcomm_types::{CounterRange, SignalRange};
use nccl_device::gin::{CounterId, SignalId};
use nccl_device::{Coop, DevComm, Window};

/// A window of 64-bit words.
pub type Words = Window<u64>;

/// The parameters of every kernel.
pub type Args = (DevComm, Words, Words, Extra, u32);

/// Handles of a test's additional device-communicator resources; zeros if there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Extra {
    /// A resource buffer.
    pub buffer: ResourceHandle,
    /// Padding to a size that is a multiple of 8.
    pub unused: u32,
    /// LSA barriers.
    pub lsa: LsaBarrierHandle,
    /// GIN barriers of the team that the GIN connections span.
    pub gin: GinBarrierHandle,
    /// An LL all-to-all.
    pub ll: LlA2aHandle,
    /// GIN signals.
    pub signals: Range,
    /// GIN counters.
    pub counters: Range,
}

/// A range of signals or counters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct Range {
    /// The first index.
    pub first: u32,
    /// The number of indices.
    pub count: u32,
}

impl Extra {
    /// Returns signal `index` of `signals`.
    #[track_caller]
    pub(crate) fn signal(&self, comm: &DevComm, index: u32) -> SignalId {
        let Range { first, count } = self.signals;
        // SAFETY: the host reserved them for the kernel's device communicator.
        unsafe { SignalId::of(comm, SignalRange { first, count }, index) }
    }

    /// Returns counter `index` of `counters`.
    #[track_caller]
    pub(crate) fn counter(&self, comm: &DevComm, index: u32) -> CounterId {
        let Range { first, count } = self.counters;
        // SAFETY: the host reserved this range of counters.
        unsafe { CounterId::of(comm, CounterRange { first, count }, index) }
    }
}

/// Returns the calling thread's share of `0..count`, which the threads of `coop` divide among
/// themselves.
pub(crate) fn share(coop: Coop, count: usize) -> impl Iterator<Item = usize> {
    (coop.thread_rank() as usize..count).step_by(coop.size() as usize)
}

// SAFETY: `Abi` is this type.
unsafe impl KernelParam for Extra {
    type Abi = Self;
}
