//! The memory that two ranks' processes share: a ring of requests and its data slots for each
//! direction.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use crate::config::{Config, SLOT_KIB, SLOTS};
use crate::driver::{Device, call};
use crate::error::{Error, Result};
use crate::region::RegionId;

/// Number of entries of a ring.
pub(crate) const ENTRIES: u64 = 128;
/// Bytes of an entry: the eight words of `Entry::to_words`.
const ENTRY_BYTES: usize = 64;
/// Bytes at the start of a direction, for the two counts below; its entries follow.
const PAGE: usize = 4096;
/// Byte offset of the count of published entries, on its own cache line.
const PUBLISHED: usize = 0;
/// Byte offset of the count of acknowledged entries.
const ACKNOWLEDGED: usize = 128;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const HOST_REGISTER_PORTABLE: u32 = 1;

/// The sizes of a segment, chosen by the rank that creates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentSizes {
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
}

impl SegmentSizes {
    pub(crate) fn of(config: &Config) -> Self {
        Self { slots: config.slots, slot_bytes: config.slot_bytes }
    }

    /// Rejects sizes out of range, which another process may have sent. Sizes in range do not
    /// overflow.
    fn require(self) -> Result<()> {
        let slot_kib = self.slot_bytes as u64 >> 10;
        if SLOTS.contains(&(self.slots as u64))
            && SLOT_KIB.contains(&slot_kib)
            && self.slot_bytes.is_multiple_of(1 << 10)
        {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "another process wants to share {} slots of {} bytes, which is out of range",
            self.slots, self.slot_bytes
        )))
    }

    fn direction_bytes(self) -> usize {
        PAGE + ENTRIES as usize * ENTRY_BYTES + self.slots * self.slot_bytes
    }

    fn bytes(self) -> usize {
        2 * self.direction_bytes()
    }

    /// Returns zeroed memory of these sizes, sealed against resizing.
    pub(crate) fn create(self) -> Result<OwnedFd> {
        let failed = |error| Error::system("creating memory shared by two processes", error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("devcomm-gin", flags).map_err(failed)?;
        ftruncate(&memory, self.bytes() as u64).map_err(failed)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
        Ok(memory)
    }
}

/// A signal update that the region's owner applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteSignal {
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) add: u64,
}

/// A request to the rank that owns the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Whether to copy from the region to the slot; otherwise from the slot to the region.
    pub(crate) get: bool,
    pub(crate) slot: usize,
    /// The number of bytes; 0 if the entry has no data.
    pub(crate) bytes: usize,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) signal: Option<RemoteSignal>,
}

impl Entry {
    fn to_words(self) -> [u64; 8] {
        let signal = self.signal.unwrap_or(RemoteSignal { region: 0, offset: 0, add: 0 });
        let kind = u64::from(self.get) | u64::from(self.signal.is_some()) << 1;
        let (slot, bytes) = (self.slot as u64, self.bytes as u64);
        let RemoteSignal { region, offset, add } = signal;
        [kind, slot, bytes, self.region, self.offset, region, offset, add]
    }

    fn from_words(words: [u64; 8]) -> Self {
        let [kind, slot, bytes, region, offset, signal_region, signal_offset, add] = words;
        let signal = RemoteSignal { region: signal_region, offset: signal_offset, add };
        Self {
            get: kind & 1 != 0,
            slot: slot as usize,
            bytes: bytes as usize,
            region,
            offset,
            signal: (kind & 2 != 0).then_some(signal),
        }
    }
}

/// The shared memory, mapped and pinned in this process.
pub(crate) struct Segment {
    device: Device,
    map: MmapRaw,
    pub(crate) sizes: SegmentSizes,
}

impl Segment {
    /// Maps `memory`. The other process may have sent `sizes`.
    pub(crate) fn map(memory: &OwnedFd, sizes: SegmentSizes, device: &Device) -> Result<Self> {
        sizes.require()?;
        let failed = |error: &dyn std::fmt::Display| {
            Error::system("mapping memory shared by two processes", error)
        };
        let size = fstat(memory).map_err(|error| failed(&error))?.st_size;
        if usize::try_from(size).ok() != Some(sizes.bytes()) {
            return Err(failed(&format_args!("it has {size} bytes, not {}", sizes.bytes())));
        }
        let options = MmapOptions::new();
        let map = options.map_raw(memory).map_err(|error| failed(&error))?;
        let _entered = device.enter()?;
        call!(
            *device.driver,
            format_args!("for {size} bytes shared with another process"),
            cuMemHostRegister_v2(map.as_mut_ptr().cast(), sizes.bytes(), HOST_REGISTER_PORTABLE)
        )?;
        Ok(Self { device: device.clone(), map, sizes })
    }

    /// Returns the ring of direction 0 or 1.
    pub(crate) fn ring(&self, direction: usize) -> Ring<'_> {
        Ring { segment: self, base: direction * self.sizes.direction_bytes() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        let base = self.map.as_mut_ptr().cast();
        let _ = call!(*self.device.driver, "at close", cuMemHostUnregister(base));
    }
}

/// The ring and slots of one direction.
#[derive(Clone, Copy)]
pub(crate) struct Ring<'a> {
    segment: &'a Segment,
    base: usize,
}

impl Ring<'_> {
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset + 8 <= self.segment.sizes.direction_bytes());
        // SAFETY: the word is aligned and inside the mapping; both processes use it as an atomic.
        unsafe { AtomicU64::from_ptr(self.segment.map.as_mut_ptr().add(self.base + offset).cast()) }
    }

    pub(crate) fn sizes(&self) -> SegmentSizes {
        self.segment.sizes
    }

    /// Returns the number of entries that the sender has published.
    pub(crate) fn published(&self) -> u64 {
        self.word(PUBLISHED).load(Ordering::Acquire)
    }

    pub(crate) fn publish(&self, entries: u64) {
        self.word(PUBLISHED).store(entries, Ordering::Release);
    }

    /// Returns the number of entries that the owner has executed.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.word(ACKNOWLEDGED).load(Ordering::Acquire)
    }

    pub(crate) fn acknowledge(&self, entries: u64) {
        self.word(ACKNOWLEDGED).store(entries, Ordering::Release);
    }

    /// Returns a word of an entry. `publish` and `published` order its accesses, and, before it is
    /// written again, `acknowledge` and `acknowledged`.
    fn entry_word(&self, number: u64, word: usize) -> &AtomicU64 {
        self.word(PAGE + (number % ENTRIES) as usize * ENTRY_BYTES + 8 * word)
    }

    /// Writes entry `number`, which must not be published yet.
    pub(crate) fn write(&self, number: u64, entry: Entry) {
        for (index, word) in entry.to_words().into_iter().enumerate() {
            self.entry_word(number, index).store(word, Ordering::Relaxed);
        }
    }

    /// Reads entry `number`, which must be published and not acknowledged.
    pub(crate) fn read(&self, number: u64) -> Result<Entry> {
        let words =
            std::array::from_fn(|index| self.entry_word(number, index).load(Ordering::Relaxed));
        let entry = Entry::from_words(words);
        let SegmentSizes { slots, slot_bytes } = self.segment.sizes;
        if entry.bytes > slot_bytes || (entry.bytes > 0 && entry.slot >= slots) {
            return Err(Error::Internal(format!(
                "another process wrote an invalid ring entry to shared memory: {entry:?}"
            )));
        }
        Ok(entry)
    }

    /// Returns the memory of a slot.
    pub(crate) fn slot(&self, slot: usize) -> *mut u8 {
        let SegmentSizes { slots, slot_bytes } = self.segment.sizes;
        debug_assert!(slot < slots);
        let offset = self.base + PAGE + ENTRIES as usize * ENTRY_BYTES + slot * slot_bytes;
        // SAFETY: the slot is inside the mapping.
        unsafe { self.segment.map.as_mut_ptr().add(offset) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_range_are_refused() {
        assert_eq!(SegmentSizes::of(&Config::default()).require(), Ok(()));
        for (slots, slot_bytes) in
            [(0, 4096), (2, 0), (2, 4097), (usize::MAX, 4096), (2, usize::MAX)]
        {
            assert!(SegmentSizes { slots, slot_bytes }.require().is_err());
        }
    }

    #[test]
    fn an_entry_converts_to_words_and_back() {
        let signal = RemoteSignal { region: 4, offset: 8, add: u64::MAX };
        let put =
            Entry { get: false, slot: 3, bytes: 77, region: 9, offset: 1 << 40, signal: None };
        for entry in [put, Entry { get: true, ..put }, Entry { signal: Some(signal), ..put }] {
            assert_eq!(Entry::from_words(entry.to_words()), entry);
        }
    }
}
