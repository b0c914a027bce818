//! A CUDA stream of the plugin with completion words in pinned memory.
//!
//! A *sequence number* marks the completion of an operation, a *mark* that of a step within one.
//! Both only grow, so a test is one load, without an event or a driver call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::config;
use crate::driver::{Address, Device, MemOp, NOT_READY, Pinned, RawEvent, RawStream, call};
use crate::error::{Error, Result};

/// Bytes between two words, so that they do not share a cache line.
const WORD_STRIDE: usize = 128;
const DONE: usize = 0;
const MARK: usize = WORD_STRIDE;
const CELL: usize = 2 * WORD_STRIDE;

/// A stream on a rank's device. Callers that enqueue have made the [`Device`]'s context current.
pub(crate) struct Channel {
    pub(crate) device: Device,
    stream: RawStream,
    words: Pinned,
    /// The last mark. The lock makes its number and its position in the stream one step.
    marks: Mutex<u64>,
}

// SAFETY: streams may be used from every thread; the lane keeps the order.
unsafe impl Send for Channel {}
// SAFETY: as above; the words are atomics.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let words = device.pinned(3 * WORD_STRIDE)?;
        let stream = device.stream()?;
        Ok(Self { device: device.clone(), stream, words, marks: Mutex::new(0) })
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: a word of `words`, aligned, alive as long as `self`; the device writes it whole.
        unsafe { AtomicU64::from_ptr(self.words.host.add(offset).cast()) }
    }

    /// Sequence number of the last completed operation.
    pub(crate) fn done(&self) -> u64 {
        self.word(DONE).load(Ordering::Acquire)
    }

    /// Marks operation `sequence` complete from the host, when its last step is the host's. The
    /// stream is idle then.
    pub(crate) fn set_done(&self, sequence: u64) {
        self.word(DONE).store(sequence, Ordering::Release);
    }

    /// Marks it complete from the stream.
    pub(crate) fn when_done(&self, sequence: u64) -> MemOp {
        MemOp::write_64(self.words.address + DONE as Address, sequence)
    }

    /// Enqueues a new mark.
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

    /// Pinned storage for one word.
    pub(crate) fn cell(&self) -> *mut u64 {
        self.word(CELL).as_ptr()
    }

    /// Enqueues memory operations, in order.
    pub(crate) fn run(&self, operations: &mut [MemOp]) -> Result<()> {
        let count = operations.len() as u32;
        call!(
            *self.device.driver,
            "for a signal or completion",
            cuStreamBatchMemOp_v2(self.stream, count, operations.as_mut_ptr(), 0)
        )
    }

    /// Copies from another device to this one directly. `reached` is the address of `from` for this
    /// device, if it can access it.
    pub(crate) fn copy_direct(
        &self,
        how: config::CopyMethod,
        to: Address,
        source: &Device,
        from: Address,
        reached: Option<Address>,
        bytes: usize,
    ) -> Result<()> {
        let (driver, context) = (&*self.device.driver, self.device.context);
        let purpose = format_args!("for {bytes} bytes between devices");
        let mapped = match how {
            config::CopyMethod::Mapped if reached.is_none() => {
                return Err(Error::Unsupported(format!(
                    "device {} does not reach memory of device {} at {from:#x}, which \
                     DEVCOMM_GIN_COPY=mapped needs",
                    self.device.number, source.number
                )));
            }
            config::CopyMethod::Auto | config::CopyMethod::Mapped => reached,
            config::CopyMethod::Peer | config::CopyMethod::Staged => None,
        };
        match mapped {
            Some(from) => {
                call!(*driver, purpose, cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream))
            }
            None => call!(
                *driver,
                purpose,
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

    /// Records `event`, an event of this device.
    pub(crate) fn record(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuEventRecord(event, self.stream))
    }

    /// Makes the stream wait for `event`.
    pub(crate) fn wait(&self, event: RawEvent) -> Result<()> {
        call!(*self.device.driver, "for a staged copy", cuStreamWaitEvent(self.stream, event, 0))
    }

    /// Queries the driver: whether the stream is idle, or an operation has failed.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.device.driver.functions().cuStreamQuery)(self.stream) };
        if code == NOT_READY {
            return Ok(false);
        }
        let purpose = || "for copies in flight".to_owned();
        self.device.driver.check(code, "cuStreamQuery", purpose).map(|()| true)
    }
}

impl Channel {
    /// Synchronises the stream; returns whether that succeeded.
    pub(crate) fn synchronize(&self) -> bool {
        self.device.enter().is_ok_and(|_entered| {
            call!(*self.device.driver, "at close", cuStreamSynchronize(self.stream)).is_ok()
        })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.synchronize();
        let Ok(_entered) = self.device.enter() else { return };
        let driver = &*self.device.driver;
        let _ = call!(*driver, "at close", cuStreamDestroy_v2(self.stream));
    }
}
