//! Abort blocks: pinned memory with the abort flag that waiting kernels poll, and the records in
//! which they write what they waited for.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use devcomm_sys::driver::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, Driver};
use devcomm_types::{AbortBlock, STUCK_RECORDS, StuckRecord};

use super::{PrimaryContext, check};
use crate::error::{Error, Result};

/// An [`AbortBlock`] shared by host and GPU. Dropping it leaves the memory allocated.
pub(crate) struct SharedBlock {
    driver: &'static Driver,
    host: NonNull<AbortBlock>,
    /// The device address of the block.
    device: u64,
}

// SAFETY: pinned memory belongs to no thread. The flag is atomic, the host reads records that the
// GPU has completed, and writes the rest through `&mut self` only.
unsafe impl Send for SharedBlock {}

impl PrimaryContext {
    /// Returns a block for this GPU, zeroed.
    pub(crate) fn alloc_abort_block(&self) -> Result<SharedBlock> {
        self.bind()?;
        let (mut host, mut device) = (null_mut(), 0);
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        let (driver, bytes) = (self.driver, size_of::<AbortBlock>());
        // SAFETY: the context is current; `host` is live.
        let made = unsafe { driver.cuMemHostAlloc(&raw mut host, bytes, flags as _) };
        check(driver, "cuMemHostAlloc", made)?;
        let address = NonNull::new(host.cast::<AbortBlock>()).filter(|host| host.is_aligned());
        let Some(address) = address else {
            return Err(Error::invalid(
                "cuMemHostAlloc returned memory that is not aligned to 64 bytes",
            ));
        };
        // SAFETY: fresh memory of that size, without other users.
        unsafe { address.write_bytes(0, 1) };
        // SAFETY: `device` is live, the memory was allocated for the device's use.
        let mapped = unsafe { driver.cuMemHostGetDevicePointer_v2(&raw mut device, host, 0) };
        check(driver, "cuMemHostGetDevicePointer", mapped)?;
        Ok(SharedBlock { driver, host: address, device })
    }
}

impl SharedBlock {
    /// Returns the device address of the flag.
    pub(crate) fn device_flag(&self) -> u64 {
        self.device + std::mem::offset_of!(AbortBlock, flag) as u64
    }

    /// Asks the kernels to exit.
    pub(crate) fn raise(&self) {
        // SAFETY: the block is allocated as long as `self`; the GPU only reads the flag, and the
        // host writes it as an atomic.
        let flag = unsafe { AtomicU32::from_ptr(&raw mut (*self.host.as_ptr()).flag) };
        // Any ordering is enough: kernels that see it read nothing else that the host has written.
        flag.store(1, Ordering::Release);
    }

    /// Returns whether an abort has ended a wait without a record.
    pub(crate) fn has_continued(&self) -> bool {
        // SAFETY: the block is allocated as long as `self`; the GPU stores whole words.
        let continued = unsafe { AtomicU32::from_ptr(&raw mut (*self.host.as_ptr()).continued) };
        continued.load(Ordering::Acquire) != 0
    }

    /// Returns the records that are complete.
    pub(crate) fn records(&self) -> Vec<StuckRecord> {
        (0..STUCK_RECORDS).filter_map(|index| self.record(index)).collect()
    }

    fn record(&self, index: usize) -> Option<StuckRecord> {
        // SAFETY: the index is within the block, which is allocated as long as `self`.
        let record = unsafe { &raw mut (*self.host.as_ptr()).records[index] };
        // SAFETY: as above; the GPU writes the kind last, as an atomic.
        let kind = unsafe { AtomicU32::from_ptr(&raw mut (*record).kind) }.load(Ordering::Acquire);
        // SAFETY: as above. After the acquire load, the other fields are visible; another thread
        // block may overwrite the record, with values that are valid too.
        (kind != 0).then(|| unsafe { record.read_volatile() })
    }

    /// Zeroes the block for reuse. No kernel may use it.
    pub(crate) fn clear(&mut self) {
        // SAFETY: the block is allocated as long as `self`, and zero is valid for every field.
        unsafe { self.host.write_bytes(0, 1) };
    }

    /// Frees the block.
    ///
    /// # Safety
    ///
    /// No kernel uses it, and the context that it was allocated in is current.
    pub(crate) unsafe fn free(self) -> Result<()> {
        // SAFETY: allocated by `alloc_abort_block`; the rest is the caller's contract.
        let freed = unsafe { self.driver.cuMemFreeHost(self.host.as_ptr().cast()) };
        check(self.driver, "cuMemFreeHost", freed)
    }
}
