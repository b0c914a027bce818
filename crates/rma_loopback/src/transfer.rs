//! One operation into a rank: data, then perhaps a signal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::channel::Channel;
use crate::config::{Adding, Config};
use crate::driver::{Address, MemOp};
use crate::error::{Error, Result};
use crate::staging::Staging;

/// Where data comes from.
pub(crate) enum Source {
    /// The memory of a rank's device; `reached` is its address for the target's device, if that
    /// reaches it.
    Device { staging: Arc<Staging>, address: Address, reached: Option<Address> },
    /// A rank's host memory, of any kind.
    Host { staging: Arc<Staging>, address: *const u8 },
    /// Pinned memory that stays as it is until the operation is complete.
    Pinned(*const u8),
}

impl Source {
    /// Memory of the rank that `staging` belongs to.
    pub(crate) fn of(place: Place, reached: Option<Address>, staging: &Arc<Staging>) -> Self {
        let staging = Arc::clone(staging);
        match place {
            Place::Device(address) => Self::Device { staging, address, reached },
            Place::Host(address) | Place::Pinned(address) => Self::Host { staging, address },
        }
    }
}

/// Where data goes.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// The device whose lane the transfer is on.
    Device(Address),
    /// Host memory, of any kind.
    Host(*mut u8),
    /// Pinned memory. The source is the lane's own device.
    Pinned(*mut u8),
}

impl Place {
    /// The place `bytes` further on.
    pub(crate) fn at(self, bytes: usize) -> Self {
        match self {
            Self::Device(address) => Self::Device(address + bytes as Address),
            Self::Host(address) => Self::Host(address.wrapping_add(bytes)),
            Self::Pinned(address) => Self::Pinned(address.wrapping_add(bytes)),
        }
    }
}

/// What is moved.
pub(crate) enum Data {
    /// A signal alone, or nothing.
    None,
    /// One aligned word of 4 or 8 bytes to the device, known to the host.
    Word { to: Address, value: u64, bytes: usize },
    /// A range, of which `moved` bytes are on their way.
    Range { from: Source, to: Place, bytes: usize, moved: usize },
}

impl Data {
    /// A range; or a word, where the host can read it now and the device can write it at once.
    pub(crate) fn of(from: Source, to: Place, bytes: usize) -> Self {
        if let (Source::Host { address, .. }, Place::Device(to), 4 | 8) = (&from, to, bytes)
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
    pub(crate) place: Place,
    pub(crate) add: u64,
    /// What the word is, where only the plugin writes it.
    pub(crate) shadow: Option<(Arc<[AtomicU64]>, usize)>,
}

/// Data, then perhaps a signal.
pub(crate) struct Transfer {
    pub(crate) data: Data,
    pub(crate) signal: Option<Signal>,
}

// SAFETY: the pointers are into registered regions and pinned memory, which stay until the
// operation is complete: NCCL promises it.
unsafe impl Send for Transfer {}

/// What the host does when the stream has come to it. Nothing else of the lane is on the stream
/// then.
pub(crate) enum Step {
    /// Copy to host memory.
    Land { from: *const u8, to: *mut u8, bytes: usize, slot: Option<usize> },
    /// Add to a word of host memory.
    AddOnHost { word: *mut u64, add: u64 },
    /// Write the sum of what was read and `add`.
    WriteSum { word: Address, add: u64 },
}

// SAFETY: as for `Transfer`.
unsafe impl Send for Step {}

/// How far a transfer came.
pub(crate) enum Issued {
    /// All of it is on the stream.
    Whole,
    /// The host has something to do when the stream has passed the mark.
    Until { mark: u64, step: Step },
    /// There is no free slot.
    NoSlot,
}

impl Transfer {
    /// Puts what it can on `channel`, whose device is entered: all of it ends with `sequence` being
    /// done.
    pub(crate) fn issue(
        &mut self,
        channel: &Arc<Channel>,
        config: &Config,
        sequence: u64,
    ) -> Result<Issued> {
        let mut last = Last::new();
        match &mut self.data {
            Data::None => {}
            Data::Word { to, value, bytes: 8 } => last.push(MemOp::write_64(*to, *value)),
            Data::Word { to, value, .. } => last.push(MemOp::write_32(*to, *value as u32)),
            Data::Range { from, to, bytes, moved } => {
                let begun = move_range(channel, config, from, *to, *bytes, moved)?;
                if !matches!(begun, Issued::Whole) {
                    return Ok(begun);
                }
            }
        }
        if let Some(signal) = &self.signal {
            match signal.place {
                Place::Device(word)
                    if channel.device.reductions && config.adding == Adding::Auto =>
                {
                    last.push(MemOp::barrier());
                    last.push(MemOp::add_64(word, signal.add));
                }
                Place::Device(word) => match &signal.shadow {
                    Some((shadow, index)) => {
                        // The lane's lock makes this addition and its place on the stream one step.
                        let before = shadow[*index].fetch_add(signal.add, Ordering::Relaxed);
                        last.push(MemOp::write_64(word, before.wrapping_add(signal.add)));
                    }
                    // The word may be another connection's, too, which has a lane of its own.
                    None if config.connections > 1 => {
                        return Err(Error::Unserved(format!(
                            "signals to an address need one connection, not {} \
                             (DEVCOMM_GIN_CONNECTIONS), or devices that add by themselves (a \
                             driver of CUDA 13.1, DEVCOMM_GIN_SIGNAL not set)",
                            config.connections
                        )));
                    }
                    None => {
                        last.run(channel)?;
                        channel.copy_out(channel.cell().cast(), word, 8)?;
                        let step = Step::WriteSum { word, add: signal.add };
                        return Ok(Issued::Until { mark: channel.mark()?, step });
                    }
                },
                Place::Host(word) | Place::Pinned(word) => {
                    last.run(channel)?;
                    let step = Step::AddOnHost { word: word.cast(), add: signal.add };
                    return Ok(Issued::Until { mark: channel.mark()?, step });
                }
            }
        }
        last.push(channel.when_done(sequence));
        last.run(channel)?;
        Ok(Issued::Whole)
    }

    /// Does the host's step. `true`: the transfer is on the stream, or complete.
    pub(crate) fn step(&mut self, step: Step, channel: &Channel, sequence: u64) -> Result<bool> {
        match step {
            Step::Land { from, to, bytes, slot } => {
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
            Step::AddOnHost { word, add } => {
                // SAFETY: an aligned word of a registered region, checked when the transfer was
                // made.
                unsafe { AtomicU64::from_ptr(word) }.fetch_add(add, Ordering::Release);
                channel.set_done(sequence);
                Ok(true)
            }
            Step::WriteSum { word, add } => {
                // SAFETY: the channel's cell; the stream has filled it and passed the mark.
                let before = unsafe { AtomicU64::from_ptr(channel.cell()) }.load(Ordering::Relaxed);
                let sum = before.wrapping_add(add);
                channel.run(&mut [MemOp::write_64(word, sum), channel.when_done(sequence)])?;
                Ok(true)
            }
        }
    }
}

/// Moves what is left of a range, straight or by slots.
fn move_range(
    channel: &Arc<Channel>,
    config: &Config,
    from: &Source,
    to: Place,
    bytes: usize,
    moved: &mut usize,
) -> Result<Issued> {
    while *moved < bytes {
        let left = bytes - *moved;
        match (from, to) {
            (Source::Device { staging, address, reached }, Place::Device(to))
                if config.copy != crate::config::Copy::Staged =>
            {
                let source = &staging.channel.device;
                channel.copy_straight(config.copy, to, source, *address, *reached, bytes)?;
                *moved = bytes;
            }
            (Source::Pinned(from), Place::Device(to)) => {
                channel.copy_in(to, *from, bytes)?;
                *moved = bytes;
            }
            (Source::Device { address, .. }, Place::Pinned(to)) => {
                channel.copy_out(to, *address, bytes)?;
                *moved = bytes;
            }
            (Source::Host { address: from, .. } | Source::Pinned(from), Place::Host(to))
            | (Source::Host { address: from, .. } | Source::Pinned(from), Place::Pinned(to)) => {
                let step = Step::Land { from: *from, to, bytes, slot: None };
                return Ok(Issued::Until { mark: channel.mark()?, step });
            }
            (Source::Device { staging, address, .. }, to) => {
                let Some(slot) = staging.take() else { return Ok(Issued::NoSlot) };
                let part = left.min(staging.slot_bytes);
                staging.fill(slot, *address + *moved as Address, part, channel)?;
                match to {
                    Place::Device(to) => {
                        channel.copy_in(to + *moved as Address, staging.room(slot), part)?;
                        staging.free_when(slot, channel, channel.mark()?);
                        *moved += part;
                    }
                    Place::Host(to) | Place::Pinned(to) => {
                        let from: *const u8 = staging.room(slot);
                        let to = to.wrapping_add(*moved);
                        let step = Step::Land { from, to, bytes: part, slot: Some(slot) };
                        return Ok(Issued::Until { mark: channel.mark()?, step });
                    }
                }
            }
            (Source::Host { staging, address }, Place::Device(to)) => {
                let Some(slot) = staging.take() else { return Ok(Issued::NoSlot) };
                let part = left.min(staging.slot_bytes);
                // SAFETY: the range is in a registered region, checked when the transfer was made;
                // the slot is ours.
                unsafe { std::ptr::copy(address.add(*moved), staging.room(slot), part) };
                channel.copy_in(to + *moved as Address, staging.room(slot), part)?;
                staging.free_when(slot, channel, channel.mark()?);
                *moved += part;
            }
        }
    }
    Ok(Issued::Whole)
}

/// The memory operations that end a transfer: one call of the driver.
struct Last {
    operations: [MemOp; 4],
    count: usize,
}

impl Last {
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
