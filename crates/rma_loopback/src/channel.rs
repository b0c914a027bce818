//! A stream of the plugin, and the words in pinned memory by which it says how far it is.
//!
//! A *sequence number* tells when an operation is complete, a *mark* when a step inside one is.
//! Both only grow, so that asking is one load: no event, no call of the driver.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::config;
use crate::driver::{Address, Device, MemOp, NOT_READY, Pinned, RawEvent, RawStream, call};
use crate::error::{Error, Result};

/// Bytes from one word to the next: they do not share a cache line.
const APART: usize = 128;
const DONE: usize = 0;
const MARK: usize = APART;
const CELL: usize = 2 * APART;

/// A stream on a rank's device. Whoever enqueues has entered the [`Device`] of it.
pub(crate) struct Channel {
    pub(crate) device: Device,
    stream: RawStream,
    words: Pinned,
    /// The last mark. The lock makes its number and its place on the stream one step.
    marks: Mutex<u64>,
}

// SAFETY: the driver takes streams from every thread; order is the lane's business.
unsafe impl Send for Channel {}
// SAFETY: as above; the words are atomics.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let words = device.pinned(3 * APART)?;
        let stream = device.stream()?;
        Ok(Self { device: device.clone(), stream, words, marks: Mutex::new(0) })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: a word of `words`, aligned, alive as long as `self`; the device writes it whole.
        unsafe { AtomicU64::from_ptr(self.words.host.add(offset).cast()) }
    }

    /// The last operation that is complete.
    pub(crate) fn done(&self) -> u64 {
        self.word(DONE).load(Ordering::Acquire)
    }

    /// Says that operation `sequence` is complete, for one whose last step is the host's. The
    /// stream has nothing to do then.
    pub(crate) fn set_done(&self, sequence: u64) {
        self.word(DONE).store(sequence, Ordering::Release);
    }

    /// Says so from the stream.
    pub(crate) fn when_done(&self, sequence: u64) -> MemOp {
        MemOp::write_64(self.words.address + DONE as Address, sequence)
    }

    /// A new mark, set when the stream is here.
    pub(crate) fn mark(&self) -> Result<u64> {
        let mut mark = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        *mark += 1;
        self.run(&mut [MemOp::write_64(self.words.address + MARK as Address, *mark)])?;
        Ok(*mark)
    }

    /// Whether the stream has passed `mark`.
    pub(crate) fn passed(&self, mark: u64) -> bool {
        self.word(MARK).load(Ordering::Acquire) >= mark
    }

    /// Pinned room for one word.
    pub(crate) fn cell(&self) -> *mut u64 {
        self.word(CELL).as_ptr()
    }

    /// Runs memory operations in order.
    pub(crate) fn run(&self, operations: &mut [MemOp]) -> Result<()> {
        let count = operations.len() as u32;
        call!(
            *self.device.driver,
            "for a signal or completion",
            cuStreamBatchMemOp_v2(self.stream, count, operations.as_mut_ptr(), 0)
        )
    }

    /// Copies from a device to this one, without a stop in host memory that the plugin knows of.
    /// `reached` is what `from` is for this device, if that reaches it.
    pub(crate) fn copy_straight(
        &self,
        how: config::Copy,
        to: Address,
        source: &Device,
        from: Address,
        reached: Option<Address>,
        bytes: usize,
    ) -> Result<()> {
        let (driver, context) = (&*self.device.driver, self.device.context);
        let place = format_args!("for {bytes} bytes between devices");
        let mapped = match how {
            config::Copy::Mapped if reached.is_none() => {
                return Err(Error::Unserved(format!(
                    "device {} does not reach memory of device {} at {from:#x}, which \
                     DEVCOMM_GIN_COPY=mapped needs",
                    self.device.number, source.number
                )));
            }
            config::Copy::Auto | config::Copy::Mapped => reached,
            config::Copy::Peer | config::Copy::Staged => None,
        };
        match mapped {
            Some(from) => call!(*driver, place, cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream)),
            None => call!(
                *driver,
                place,
                cuMemcpyPeerAsync(to, context, from, source.context, bytes, self.stream)
            ),
        }
    }

    /// Copies from pinned memory to this device.
    pub(crate) fn copy_in(&self, to: Address, from: *const u8, bytes: usize) -> Result<()> {
        call!(
            *self.device.driver,
            format_args!("for {bytes} bytes from the host"),
            cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.stream)
        )
    }

    /// Copies from this device to pinned memory.
    pub(crate) fn copy_out(&self, to: *mut u8, from: Address, bytes: usize) -> Result<()> {
        call!(
            *self.device.driver,
            format_args!("for {bytes} bytes to the host"),
            cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.stream)
        )
    }

    /// Sets `event`, an event of this device, when the stream is here.
    pub(crate) fn record(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuEventRecord(event, self.stream))
    }

    /// The stream goes on when `event` is set.
    pub(crate) fn wait(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuStreamWaitEvent(self.stream, event, 0))
    }

    /// Asks the driver whether nothing is on the stream, and whether what was there has failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.device.driver.functions().cuStreamQuery)(self.stream) };
        if code == NOT_READY {
            return Ok(false);
        }
        let place = || "for copies on the way".to_owned();
        self.device.driver.check(code, "cuStreamQuery", place).map(|()| true)
    }
}

impl Channel {
    /// Waits for what is on the stream. Whether that came to a good end.
    pub(crate) fn settle(&self) -> bool {
        self.device.enter().is_ok_and(|_entered| {
            call!(*self.device.driver, "at close", cuStreamSynchronize(self.stream)).is_ok()
        })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.settle();
        let Ok(_entered) = self.device.enter() else { return };
        let driver = &*self.device.driver;
        let _ = call!(*driver, "at close", cuStreamDestroy_v2(self.stream));
    }
}
