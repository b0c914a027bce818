//! A CUDA stream that writes its progress to words in pinned memory.
//!
//! It writes a *sequence number* when it has completed an operation, and a *mark* when it has
//! completed a step within one. Both only grow, so a test is one load, without a driver call.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::config;
use crate::driver::{Address, Device, MemOp, NOT_READY, Pinned, RawEvent, RawStream, call};
use crate::error::{Error, Result};

/// Bytes from one word to the next, so that no two share a cache line.
const WORD_STRIDE: usize = 128;
/// Byte offsets in `words`: the sequence number, the mark, the scratch word, the slots.
const DONE: usize = 0;
const MARK: usize = WORD_STRIDE;
const SCRATCH: usize = 2 * WORD_STRIDE;
const SLOTS: usize = 3 * WORD_STRIDE;

/// The maximum number of words that [`TrackedStream::copy_words`] writes.
pub(crate) const STAGED: usize = 64;
/// The number of slots for such words. A slot is written again only after its copy has ended, since
/// fewer copies than slots are in the stream: one for each group, of which the inbound queue allows
/// two, and one for the group before a host step, for which it waits.
const N_SLOTS: usize = 8;

/// A stream on a rank's device. Callers make the [`Device`]'s context current before they enqueue.
pub(crate) struct TrackedStream {
    pub(crate) device: Device,
    raw: RawStream,
    words: ManuallyDrop<Pinned>,
    /// The last mark. The lock is held while it is enqueued, so that marks are in order.
    marks: Mutex<u64>,
    /// The number of copies of words so far.
    copies: AtomicUsize,
    /// Whether the connection has failed and its streams did not become idle in time.
    is_stuck: AtomicBool,
}

// SAFETY: CUDA streams may be used from every thread.
unsafe impl Send for TrackedStream {}
// SAFETY: several threads may use a CUDA stream at a time, and the words are atomics.
unsafe impl Sync for TrackedStream {}

impl TrackedStream {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let words = device.pinned(SLOTS + N_SLOTS * STAGED * 8)?;
        let raw = device.create_stream()?;
        Ok(Self {
            device: device.clone(),
            raw,
            words: ManuallyDrop::new(words),
            marks: Mutex::new(0),
            copies: AtomicUsize::new(0),
            is_stuck: AtomicBool::new(false),
        })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the word is aligned and as live as `self`; the device writes all 8 bytes at once.
        unsafe { AtomicU64::from_ptr(self.words.host.add(offset).cast()) }
    }

    /// Returns the sequence number of the last completed operation.
    pub(crate) fn done(&self) -> u64 {
        self.word(DONE).load(Ordering::Acquire)
    }

    /// Marks operation `sequence`, whose last step the host executed, complete on an idle stream.
    pub(crate) fn set_done(&self, sequence: u64) {
        self.word(DONE).store(sequence, Ordering::Release);
    }

    /// Returns the memory operation by which the stream marks operation `sequence` complete.
    pub(crate) fn done_op(&self, sequence: u64) -> MemOp {
        MemOp::write_64(self.words.address + DONE as Address, sequence)
    }

    /// Enqueues the next mark and returns it.
    pub(crate) fn mark(&self) -> Result<u64> {
        let mut mark = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        *mark += 1;
        self.enqueue(&mut [MemOp::write_64(self.words.address + MARK as Address, *mark)])?;
        Ok(*mark)
    }

    /// Returns whether the stream has passed `mark`.
    pub(crate) fn passed(&self, mark: u64) -> bool {
        self.word(MARK).load(Ordering::Acquire) >= mark
    }

    /// Returns a word in pinned memory, for a value that the stream reads from the device. One word
    /// is enough, as later transfers wait for the host step that reads it.
    pub(crate) fn scratch(&self) -> *mut u64 {
        self.word(SCRATCH).as_ptr()
    }

    /// Enqueues memory operations, in order.
    pub(crate) fn enqueue(&self, operations: &mut [MemOp]) -> Result<()> {
        let count = operations.len() as u32;
        call!(
            *self.device.driver,
            "for a signal or completion",
            cuStreamBatchMemOp_v2(self.raw, count, operations.as_mut_ptr(), 0)
        )
    }

    /// Copies from `source` to this device without staging. `mapped` is the address at which this
    /// device can access the data, if it can.
    pub(crate) fn copy_direct(
        &self,
        method: config::CopyMethod,
        to: Address,
        source: &Device,
        from: Address,
        mapped: Option<Address>,
        bytes: usize,
    ) -> Result<()> {
        let (driver, context) = (&*self.device.driver, self.device.context);
        let purpose = format_args!("for {bytes} bytes between devices");
        let direct = match method {
            config::CopyMethod::Mapped if mapped.is_none() => {
                return Err(Error::Unsupported(format!(
                    "device {} cannot access the memory of device {} at {from:#x}, which \
                     DEVCOMM_GIN_COPY=mapped requires",
                    self.device.number, source.number
                )));
            }
            config::CopyMethod::Auto | config::CopyMethod::Mapped => mapped,
            config::CopyMethod::Peer | config::CopyMethod::Staged => None,
        };
        match direct {
            Some(from) => {
                call!(*driver, purpose, cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw))
            }
            None => call!(
                *driver,
                purpose,
                cuMemcpyPeerAsync(to, context, from, source.context, bytes, self.raw)
            ),
        }
    }

    /// Copies from pinned memory to this device.
    pub(crate) fn copy_h2d(&self, to: Address, from: *const u8, bytes: usize) -> Result<()> {
        call!(
            *self.device.driver,
            format_args!("for {bytes} bytes from the host"),
            cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw)
        )
    }

    /// Copies at most [`STAGED`] words to this device, through a slot in pinned memory.
    pub(crate) fn copy_words(
        &self,
        to: Address,
        words: impl ExactSizeIterator<Item = u64>,
    ) -> Result<()> {
        let slot = self.copies.fetch_add(1, Ordering::Relaxed) % N_SLOTS;
        let (from, bytes) = (SLOTS + slot * STAGED * 8, 8 * words.len());
        for (index, word) in words.take(STAGED).enumerate() {
            self.word(from + 8 * index).store(word, Ordering::Relaxed);
        }
        // The copy sees what this thread has stored before it calls the driver.
        self.copy_h2d(to, self.word(from).as_ptr().cast_const().cast(), bytes)
    }

    /// Copies from this device to pinned memory.
    pub(crate) fn copy_d2h(&self, to: *mut u8, from: Address, bytes: usize) -> Result<()> {
        call!(
            *self.device.driver,
            format_args!("for {bytes} bytes to the host"),
            cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw)
        )
    }

    /// Records `event`, an event of this device.
    pub(crate) fn record(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuEventRecord(event, self.raw))
    }

    /// Makes the stream wait for `event`.
    pub(crate) fn wait(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuStreamWaitEvent(self.raw, event, 0))
    }

    /// Queries the driver whether the stream is idle; an error if one of its operations has failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.device.driver.functions().cuStreamQuery)(self.raw) };
        if code == NOT_READY {
            return Ok(false);
        }
        let purpose = || "for copies in flight".to_owned();
        self.device.driver.check(code, "cuStreamQuery", purpose).map(|()| true)
    }

    /// Records whether waits for the stream are to end at once.
    pub(crate) fn set_stuck(&self, is_stuck: bool) {
        self.is_stuck.store(is_stuck, Ordering::Release);
    }

    /// Waits until the stream is idle, has failed or is stuck; returns whether it is idle. If not,
    /// its copies may go on, and a kernel may occupy the device, for which the driver would wait
    /// before it frees pinned memory: so the caller leaks what the stream uses.
    pub(crate) fn ends(&self) -> bool {
        while !self.is_stuck.load(Ordering::Acquire) {
            match self.is_idle() {
                Ok(false) => std::thread::yield_now(),
                ended => return ended.is_ok(),
            }
        }
        false
    }
}

impl Drop for TrackedStream {
    fn drop(&mut self) {
        if !self.ends() {
            return;
        }
        // SAFETY: the words are dropped here only, and not used again: the stream is idle.
        unsafe { ManuallyDrop::drop(&mut self.words) };
        let Ok(_entered) = self.device.enter() else { return };
        let driver = &*self.device.driver;
        let _ = call!(*driver, "at close", cuStreamDestroy_v2(self.raw));
    }
}
