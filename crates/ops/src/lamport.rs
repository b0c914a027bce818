//! The memory of [`Lamport`] messages, which need no separate flags.

use std::ops::Range;

use devcomm_types::{ArgInfo, KernelParam};
use nccl_device::{ANY_RANKS, EMPTY, Lamport, LamportMemoryArgs, lamport_words};

use crate::prelude::*;

/// The memory of [`Lamport`] messages within the LSA team of a communicator.
/// A launch takes `&LamportMemory` for a kernel's parameter
/// [`LamportMemory`](nccl_device::LamportMemory).
#[derive(Debug)]
pub struct LamportMemory {
    slots: Window<u32>,
    state: SymmetricBuffer<u32>,
    capacity: u32,
    /// Whether nothing beside the launches with this memory needs room on the GPU.
    pub(crate) alone: bool,
}

impl LamportMemory {
    /// Allocates memory with `capacity` slots of 16 bytes for each rank that sends, in two banks.
    /// *Collective*: when it returns, the slots of all ranks are empty, so that kernels may send.
    ///
    /// # Errors
    ///
    /// Those of creating a window, for example if memory is exhausted.
    pub fn new(comm: &Communicator, capacity: u32) -> Result<Self> {
        comm.together("LamportMemory::new", || Self::allocate(comm, capacity))
    }

    /// Does the same as [`new`](Self::new), but other ranks' slots may not be empty yet.
    pub(crate) fn allocate(comm: &Communicator, capacity: u32) -> Result<Self> {
        let words = lamport_words(comm.n_ranks(), capacity as usize);
        let slots = comm.window::<u32>(words)?;
        // Copied 1 MiB at a time, so that the host's memory for it is small.
        let empty = vec![EMPTY; words.min(1 << 18)];
        for first in (0..words).step_by(empty.len()) {
            let part = slots.slice(first..words.min(first + empty.len()))?;
            part.copy_from_host(&empty[..part.len()])?;
        }
        // New memory is zeroed, as the state must be.
        let state = comm.mem_alloc(Lamport::<ANY_RANKS>::STATE)?;
        Ok(Self { slots, state, capacity, alone: false })
    }

    /// Returns the number of slots for each rank that sends.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    fn args(&self) -> LamportMemoryArgs<&Window<u32>, &SymmetricBuffer<u32>, u32, bool> {
        let Self { slots, state, capacity, alone } = self;
        LamportMemoryArgs { slots, state, capacity: *capacity, alone: *alone }
    }
}

type Abi = <nccl_device::LamportMemory as KernelParam>::Abi;

// SAFETY: the bytes and `info` are those of `LamportMemoryArgs` for this window and buffer.
unsafe impl IntoArg<Abi> for &LamportMemory {
    fn into_arg(self) -> Abi {
        self.args().into_arg()
    }

    fn info(&self) -> ArgInfo<'_> {
        // A device communicator would be a reference to `args`, which ends here. There is none in a
        // window and a buffer.
        let args = self.args();
        let ArgInfo { dev_comm: _, closed, communicator, mixed, several_dev_comms, unchecked } =
            IntoArg::<Abi>::info(&args);
        ArgInfo { dev_comm: None, closed, communicator, mixed, several_dev_comms, unchecked }
    }

    fn windows(&self, see: &mut dyn FnMut(Range<u64>)) {
        IntoArg::<Abi>::windows(&self.args(), see);
    }
}
