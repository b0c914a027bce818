//! A transfer: one operation into a rank, data and an optional signal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::channel::Channel;
use crate::config::{Config, SignalMethod};
use crate::driver::{Address, MemOp};
use crate::error::{Error, Result};
use crate::staging::Staging;

/// Source of data.
pub(crate) enum Source {
    /// A rank's device memory; `reached` is its address for the target's device, if that can access
    /// it.
    Device { staging: Arc<Staging>, address: Address, reached: Option<Address> },
    /// A rank's host memory, pinned or not.
    Host { staging: Arc<Staging>, address: *const u8 },
    /// Pinned memory that is unchanged until the operation is complete.
    Pinned(*const u8),
}

impl Source {
    /// Memory of the rank that `staging` belongs to.
    pub(crate) fn of(buffer: Buffer, reached: Option<Address>, staging: &Arc<Staging>) -> Self {
        let staging = Arc::clone(staging);
        match buffer {
            Buffer::Device(address) => Self::Device { staging, address, reached },
            Buffer::Host(address) | Buffer::Pinned(address) => Self::Host { staging, address },
        }
    }
}

/// Target of data.
#[derive(Clone, Copy)]
pub(crate) enum Buffer {
    /// Memory of the lane's device.
    Device(Address),
    /// Host memory, pinned or not.
    Host(*mut u8),
    /// Pinned memory, with the lane's device as the source.
    Pinned(*mut u8),
}

impl Buffer {
    /// The buffer `bytes` bytes further on.
    pub(crate) fn at(self, bytes: usize) -> Self {
        match self {
            Self::Device(address) => Self::Device(address + bytes as Address),
            Self::Host(address) => Self::Host(address.wrapping_add(bytes)),
            Self::Pinned(address) => Self::Pinned(address.wrapping_add(bytes)),
        }
    }
}

/// The data of a transfer.
pub(crate) enum Data {
    /// A signal alone, or nothing.
    None,
    /// One aligned word of 4 or 8 bytes to the device, with its value.
    Word { to: Address, value: u64, bytes: usize },
    /// A range, of which `moved` bytes are in flight.
    Range { from: Source, to: Buffer, bytes: usize, moved: usize },
}

impl Data {
    /// A range; or a word, where the host can read it now and the device can write it in one
    /// operation.
    pub(crate) fn of(from: Source, to: Buffer, bytes: usize) -> Self {
        if let (Source::Host { address, .. }, Buffer::Device(to), 4 | 8) = (&from, to, bytes)
            && to.is_multiple_of(bytes as Address)
        {
            let mut value = [0; 8];
            // SAFETY: the range is in a registered region, checked by the caller, and NCCL has
            // filled it.
            unsafe { std::ptr::copy_nonoverlapping(*address, value.as_mut_ptr(), bytes) };
            return Self::Word { to, value: u64::from_le_bytes(value), bytes };
        }
        Self::Range { from, to, bytes, moved: 0 }
    }
}

/// An addition to a word of 64 bits.
pub(crate) struct Signal {
    pub(crate) buffer: Buffer,
    pub(crate) add: u64,
    /// The word's value, if only the plugin writes it.
    pub(crate) shadow: Option<(Arc<[AtomicU64]>, usize)>,
}

/// Data, then an optional signal.
pub(crate) struct Transfer {
    pub(crate) data: Data,
    pub(crate) signal: Option<Signal>,
}

// SAFETY: the pointers are into registered regions and pinned memory, which NCCL keeps until the
// operation is complete.
unsafe impl Send for Transfer {}

/// A step of the host, once the stream has reached it. Nothing else of the lane is in the stream
/// then.
pub(crate) enum HostStep {
    /// Copy to host memory.
    Land { from: *const u8, to: *mut u8, bytes: usize, slot: Option<usize> },
    /// Add to a word of host memory.
    AddOnHost { word: *mut u64, add: u64 },
    /// Write the sum of the value read and `add`.
    WriteSum { word: Address, add: u64 },
}

// SAFETY: as for `Transfer`.
unsafe impl Send for HostStep {}

/// Result of issuing a transfer.
pub(crate) enum IssueResult {
    /// Completely enqueued.
    Whole,
    /// A host step follows once the stream has passed the mark.
    Until { mark: u64, step: HostStep },
    /// There is no free slot.
    NoSlot,
}

impl Transfer {
    /// Enqueues as much as possible on `channel`, whose context is current; the whole transfer ends
    /// by completing `sequence`.
    pub(crate) fn issue(
        &mut self,
        channel: &Arc<Channel>,
        config: &Config,
        sequence: u64,
    ) -> Result<IssueResult> {
        let mut last = TrailingOps::new();
        match &mut self.data {
            Data::None => {}
            Data::Word { to, value, bytes: 8 } => last.push(MemOp::write_64(*to, *value)),
            Data::Word { to, value, .. } => last.push(MemOp::write_32(*to, *value as u32)),
            Data::Range { from, to, bytes, moved } => {
                let begun = move_range(channel, config, from, *to, *bytes, moved)?;
                if !matches!(begun, IssueResult::Whole) {
                    return Ok(begun);
                }
            }
        }
        if let Some(signal) = &self.signal {
            match signal.buffer {
                Buffer::Device(word)
                    if channel.device.reductions && config.signal == SignalMethod::Auto =>
                {
                    last.push(MemOp::barrier());
                    last.push(MemOp::add_64(word, signal.add));
                }
                Buffer::Device(word) => match &signal.shadow {
                    Some((shadow, index)) => {
                        // The lane's lock makes this addition and its position in the stream one
                        // step.
                        let before = shadow[*index].fetch_add(signal.add, Ordering::Relaxed);
                        last.push(MemOp::write_64(word, before.wrapping_add(signal.add)));
                    }
                    // Another connection, with a lane of its own, may use the word too.
                    None if config.connections > 1 => {
                        return Err(Error::Unsupported(format!(
                            "signals to an address need one connection, not {} \
                             (DEVCOMM_GIN_CONNECTIONS), or devices that add by themselves (a \
                             driver of CUDA 13.1, DEVCOMM_GIN_SIGNAL not set)",
                            config.connections
                        )));
                    }
                    None => {
                        last.run(channel)?;
                        channel.copy_out(channel.cell().cast(), word, 8)?;
                        let step = HostStep::WriteSum { word, add: signal.add };
                        return Ok(IssueResult::Until { mark: channel.mark()?, step });
                    }
                },
                Buffer::Host(word) | Buffer::Pinned(word) => {
                    last.run(channel)?;
                    let step = HostStep::AddOnHost { word: word.cast(), add: signal.add };
                    return Ok(IssueResult::Until { mark: channel.mark()?, step });
                }
            }
        }
        last.push(channel.when_done(sequence));
        last.run(channel)?;
        Ok(IssueResult::Whole)
    }

    /// Runs the host step. `true`: the transfer is completely enqueued, or complete.
    pub(crate) fn step(
        &mut self,
        step: HostStep,
        channel: &Channel,
        sequence: u64,
    ) -> Result<bool> {
        match step {
            HostStep::Land { from, to, bytes, slot } => {
                // SAFETY: both ranges are in registered regions or slots, checked when the transfer
                // was made; the stream has passed the mark, so the source is filled.
                unsafe { std::ptr::copy(from, to, bytes) };
                if let Data::Range { from, moved, .. } = &mut self.data {
                    *moved += bytes;
                    if let (Some(slot), Source::Device { staging, .. }) = (slot, &*from) {
                        staging.free(slot);
                    }
                }
                Ok(false)
            }
            HostStep::AddOnHost { word, add } => {
                // SAFETY: an aligned word of a registered region, checked when the transfer was
                // made.
                unsafe { AtomicU64::from_ptr(word) }.fetch_add(add, Ordering::Release);
                channel.set_done(sequence);
                Ok(true)
            }
            HostStep::WriteSum { word, add } => {
                // SAFETY: the channel's cell; the stream has filled it and passed the mark.
                let before = unsafe { AtomicU64::from_ptr(channel.cell()) }.load(Ordering::Relaxed);
                let sum = before.wrapping_add(add);
                channel.run(&mut [MemOp::write_64(word, sum), channel.when_done(sequence)])?;
                Ok(true)
            }
        }
    }
}

/// Enqueues the rest of a range, directly or through slots.
fn move_range(
    channel: &Arc<Channel>,
    config: &Config,
    from: &Source,
    to: Buffer,
    bytes: usize,
    moved: &mut usize,
) -> Result<IssueResult> {
    while *moved < bytes {
        let left = bytes - *moved;
        match (from, to) {
            (Source::Device { staging, address, reached }, Buffer::Device(to))
                if config.copy != crate::config::CopyMethod::Staged =>
            {
                let source = &staging.channel.device;
                channel.copy_direct(config.copy, to, source, *address, *reached, bytes)?;
                *moved = bytes;
            }
            (Source::Pinned(from), Buffer::Device(to)) => {
                channel.copy_in(to, *from, bytes)?;
                *moved = bytes;
            }
            (Source::Device { address, .. }, Buffer::Pinned(to)) => {
                channel.copy_out(to, *address, bytes)?;
                *moved = bytes;
            }
            (Source::Host { address: from, .. } | Source::Pinned(from), Buffer::Host(to))
            | (Source::Host { address: from, .. } | Source::Pinned(from), Buffer::Pinned(to)) => {
                let step = HostStep::Land { from: *from, to, bytes, slot: None };
                return Ok(IssueResult::Until { mark: channel.mark()?, step });
            }
            (Source::Device { staging, address, .. }, to) => {
                let Some(slot) = staging.take() else { return Ok(IssueResult::NoSlot) };
                let part = left.min(staging.slot_bytes);
                staging.fill(slot, *address + *moved as Address, part, channel)?;
                match to {
                    Buffer::Device(to) => {
                        channel.copy_in(to + *moved as Address, staging.slot_memory(slot), part)?;
                        staging.free_when(slot, channel, channel.mark()?);
                        *moved += part;
                    }
                    Buffer::Host(to) | Buffer::Pinned(to) => {
                        let from: *const u8 = staging.slot_memory(slot);
                        let to = to.wrapping_add(*moved);
                        let step = HostStep::Land { from, to, bytes: part, slot: Some(slot) };
                        return Ok(IssueResult::Until { mark: channel.mark()?, step });
                    }
                }
            }
            (Source::Host { staging, address }, Buffer::Device(to)) => {
                let Some(slot) = staging.take() else { return Ok(IssueResult::NoSlot) };
                let part = left.min(staging.slot_bytes);
                // SAFETY: the range is in a registered region, checked when the transfer was made;
                // the slot is ours.
                unsafe { std::ptr::copy(address.add(*moved), staging.slot_memory(slot), part) };
                channel.copy_in(to + *moved as Address, staging.slot_memory(slot), part)?;
                staging.free_when(slot, channel, channel.mark()?);
                *moved += part;
            }
        }
    }
    Ok(IssueResult::Whole)
}

/// The memory operations at the end of a transfer, enqueued by one driver call.
struct TrailingOps {
    operations: [MemOp; 4],
    count: usize,
}

impl TrailingOps {
    fn new() -> Self {
        Self { operations: [MemOp::barrier(); 4], count: 0 }
    }

    fn push(&mut self, operation: MemOp) {
        self.operations[self.count] = operation;
        self.count += 1;
    }

    fn run(&mut self, channel: &Channel) -> Result<()> {
        if self.count > 0 {
            channel.run(&mut self.operations[..self.count])?;
            self.count = 0;
        }
        Ok(())
    }
}
