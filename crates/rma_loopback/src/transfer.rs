//! A transfer: one operation into a rank. It has data and an optional signal.
//!
//! All operations into a rank go through its *inbound* queue to one stream. Each transfer has
//! copies of its own there; words and signals are written after the copies of a whole [`Group`] of
//! transfers. A *mark* is a number that the stream writes when it has executed what was enqueued
//! before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::config::{Config, SignalMethod};
use crate::driver::{Address, MemOp};
use crate::error::{Error, Result};
use crate::group::{Group, Shadow};
use crate::staging::Staging;
use crate::stream::TrackedStream;

/// Source of data.
pub(crate) enum Source {
    /// A rank's device memory; `mapped` is the address at which the target's device can access it,
    /// if it can.
    Device { staging: Arc<Staging>, address: Address, mapped: Option<Address> },
    /// A rank's host memory, pinned or not.
    Host { staging: Arc<Staging>, address: *const u8 },
    /// Pinned memory that is unchanged until the operation is complete.
    Pinned(*const u8),
}

impl Source {
    /// Returns memory of the rank that `staging` belongs to.
    pub(crate) fn of(buffer: Buffer, mapped: Option<Address>, staging: &Arc<Staging>) -> Self {
        let staging = Arc::clone(staging);
        match buffer {
            Buffer::Device(address) => Self::Device { staging, address, mapped },
            Buffer::Host(address) | Buffer::Pinned(address) => Self::Host { staging, address },
        }
    }
}

/// A place of data: the target, or what a [`Source`] is made of.
#[derive(Clone, Copy)]
pub(crate) enum Buffer {
    /// Memory of the inbound stream's device.
    Device(Address),
    /// Host memory, pinned or not.
    Host(*mut u8),
    /// Pinned memory, to which the inbound stream can copy from its own device.
    Pinned(*mut u8),
}

impl Buffer {
    /// Returns the buffer from byte `bytes` on.
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
    /// A range; the copies of its first `moved` bytes are enqueued.
    Range { from: Source, to: Buffer, bytes: usize, moved: usize },
}

impl Data {
    /// Returns a word if the host can read it now and the device can write it in one operation,
    /// else a range.
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
    pub(crate) shadow: Option<Shadow>,
}

/// Data, then an optional signal.
pub(crate) struct Transfer {
    pub(crate) data: Data,
    pub(crate) signal: Option<Signal>,
}

// SAFETY: the pointers are into registered regions and pinned memory, which NCCL keeps until the
// operation is complete.
unsafe impl Send for Transfer {}

/// A step that the host executes when the stream has passed the mark that was enqueued before it.
/// The stream is idle then.
pub(crate) enum HostStep {
    /// Copy to host memory, from the staging slot `slot` if there is one.
    Copy { from: *const u8, to: *mut u8, bytes: usize, slot: Option<usize> },
    /// Add to a word of host memory.
    AddOnHost { word: *mut u64, add: u64 },
    /// Write to `word` the sum of `add` and its value, which the stream has copied to the host.
    WriteSum { word: Address, add: u64 },
}

// SAFETY: any thread may access the memory at its addresses, and pass these to the driver.
unsafe impl Send for HostStep {}

/// Result of issuing a transfer.
pub(crate) enum IssueResult {
    /// Completely enqueued, or in the group.
    Whole,
    /// A host step follows once the stream has passed the mark.
    Until { mark: u64, step: HostStep },
    /// There is no free slot.
    NoSlot,
}

impl Transfer {
    /// Enqueues as much as possible on `stream`, whose context is current: copies at once, words
    /// and signals with `group`. If a host step follows, the group is enqueued too, as the step
    /// needs an idle stream.
    pub(crate) fn issue(
        &mut self,
        stream: &Arc<TrackedStream>,
        config: &Config,
        group: &mut Group,
    ) -> Result<IssueResult> {
        match &mut self.data {
            Data::None => {}
            Data::Word { to, value, bytes: 8 } => group.write_64(*to, *value, None),
            Data::Word { to, value, .. } => group.write_32(*to, *value as u32),
            Data::Range { from, to, bytes, moved } => {
                if let Buffer::Device(to) = *to
                    && group.writes_to(to, *bytes)
                {
                    group.enqueue(stream)?;
                }
                let begun = move_range(stream, config, group, from, *to, *bytes, moved)?;
                if !matches!(begun, IssueResult::Whole) {
                    return Ok(begun);
                }
            }
        }
        let Some(signal) = &self.signal else { return Ok(IssueResult::Whole) };
        match signal.buffer {
            Buffer::Device(word)
                if stream.device.reductions && config.signal == SignalMethod::Auto =>
            {
                group.add_64(word, signal.add);
            }
            Buffer::Device(word) => match &signal.shadow {
                Some((shadow, index)) => {
                    // The inbound queue's lock keeps sums and writes in the same order.
                    let before = shadow[*index].fetch_add(signal.add, Ordering::Relaxed);
                    let shadow = Some((Arc::clone(shadow), *index));
                    group.write_64(word, before.wrapping_add(signal.add), shadow);
                }
                // Another connection, with its own stream, may add to the same word.
                None if config.connections > 1 => {
                    return Err(Error::Unsupported(format!(
                        "VA signals need one connection, not {} (DEVCOMM_GIN_CONNECTIONS), or \
                         devices with atomic additions (a driver for CUDA 13.1, and \
                         DEVCOMM_GIN_SIGNAL not set)",
                        config.connections
                    )));
                }
                None => {
                    group.enqueue(stream)?;
                    stream.copy_d2h(stream.scratch().cast(), word, 8)?;
                    let step = HostStep::WriteSum { word, add: signal.add };
                    return Ok(IssueResult::Until { mark: stream.mark()?, step });
                }
            },
            Buffer::Host(word) | Buffer::Pinned(word) => {
                group.enqueue(stream)?;
                let step = HostStep::AddOnHost { word: word.cast(), add: signal.add };
                return Ok(IssueResult::Until { mark: stream.mark()?, step });
            }
        }
        Ok(IssueResult::Whole)
    }

    /// Runs the host step, after the group. Returns whether it is the transfer's last step.
    pub(crate) fn step(
        &mut self,
        step: HostStep,
        stream: &TrackedStream,
        sequence: u64,
    ) -> Result<bool> {
        match step {
            HostStep::Copy { from, to, bytes, slot } => {
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
                // SAFETY: the transfer's maker checked that the word is aligned and registered.
                unsafe { AtomicU64::from_ptr(word) }.fetch_add(add, Ordering::Release);
                stream.set_done(sequence);
                Ok(true)
            }
            HostStep::WriteSum { word, add } => {
                // SAFETY: the word is aligned and live; the stream wrote it before the mark.
                let before =
                    unsafe { AtomicU64::from_ptr(stream.scratch()) }.load(Ordering::Relaxed);
                let sum = before.wrapping_add(add);
                stream.enqueue(&mut [MemOp::write_64(word, sum), stream.done_op(sequence)])?;
                Ok(true)
            }
        }
    }
}

/// Enqueues the rest of a range, directly or through slots. What needs no slot is enqueued whole,
/// so that `moved` is 0 before it and the size of the copy is `bytes`.
fn move_range(
    stream: &Arc<TrackedStream>,
    config: &Config,
    group: &mut Group,
    from: &Source,
    to: Buffer,
    bytes: usize,
    moved: &mut usize,
) -> Result<IssueResult> {
    while *moved < bytes {
        let remaining = bytes - *moved;
        match (from, to) {
            (Source::Device { staging, address, mapped }, Buffer::Device(to))
                if config.copy != crate::config::CopyMethod::Staged =>
            {
                let source = &staging.stream.device;
                stream.copy_direct(config.copy, to, source, *address, *mapped, bytes)?;
                *moved = bytes;
            }
            (Source::Pinned(from), Buffer::Device(to)) => {
                stream.copy_h2d(to, *from, bytes)?;
                *moved = bytes;
            }
            (Source::Device { address, .. }, Buffer::Pinned(to)) => {
                stream.copy_d2h(to, *address, bytes)?;
                *moved = bytes;
            }
            (Source::Host { address: from, .. } | Source::Pinned(from), Buffer::Host(to))
            | (Source::Host { address: from, .. } | Source::Pinned(from), Buffer::Pinned(to)) => {
                let step = HostStep::Copy { from: *from, to, bytes, slot: None };
                group.enqueue(stream)?;
                return Ok(IssueResult::Until { mark: stream.mark()?, step });
            }
            (Source::Device { staging, address, .. }, to) => {
                let Some(slot) = staging.take() else { return Ok(IssueResult::NoSlot) };
                let chunk = remaining.min(staging.slot_bytes);
                staging.fill(slot, *address + *moved as Address, chunk, stream)?;
                match to {
                    Buffer::Device(to) => {
                        stream.copy_h2d(
                            to + *moved as Address,
                            staging.slot_memory(slot),
                            chunk,
                        )?;
                        staging.free_when(slot, stream, stream.mark()?);
                        *moved += chunk;
                    }
                    Buffer::Host(to) | Buffer::Pinned(to) => {
                        let from: *const u8 = staging.slot_memory(slot);
                        let to = to.wrapping_add(*moved);
                        let step = HostStep::Copy { from, to, bytes: chunk, slot: Some(slot) };
                        group.enqueue(stream)?;
                        return Ok(IssueResult::Until { mark: stream.mark()?, step });
                    }
                }
            }
            (Source::Host { staging, address }, Buffer::Device(to)) => {
                let Some(slot) = staging.take() else { return Ok(IssueResult::NoSlot) };
                let chunk = remaining.min(staging.slot_bytes);
                // SAFETY: the range is in a registered region, checked when the transfer was made;
                // the slot is taken.
                unsafe { std::ptr::copy(address.add(*moved), staging.slot_memory(slot), chunk) };
                stream.copy_h2d(to + *moved as Address, staging.slot_memory(slot), chunk)?;
                staging.free_when(slot, stream, stream.mark()?);
                *moved += chunk;
            }
        }
    }
    Ok(IssueResult::Whole)
}
