//! Device memory, pinned host memory, and copies and fills of device memory in a stream.
//!
//! Copies from and to a host slice wait until they are done: if the memory is pinned, the driver
//! reads or writes it after the enqueuing call has returned.

use std::ptr::{NonNull, null_mut};

use devcomm_sys::driver::{CU_MEMHOSTALLOC_PORTABLE, CUdeviceptr, Driver};

use super::stream::StreamHandle;
use super::{PrimaryContext, check};
use crate::error::{Error, Result};

impl StreamHandle {
    /// Copies to the device and waits.
    ///
    /// # Safety
    ///
    /// The stream's context is current. `to` is device memory of at least `from.len()` bytes, and
    /// nothing but work of this stream uses it meanwhile.
    pub(crate) unsafe fn copy_to_device(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the source outlives the wait below; the rest is the caller's contract.
        unsafe { self.enqueue_copy_to_device(to, from.as_ptr(), from.len())? };
        self.synchronize()
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    ///
    /// The contract is that of [`copy_to_device`](Self::copy_to_device); until the copy is done,
    /// source and target stay allocated and the source is not written.
    pub(crate) unsafe fn enqueue_copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller keeps the memory valid until the stream has done the operation.
        let result =
            unsafe { self.driver().cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw()) };
        check(self.driver(), "cuMemcpyHtoDAsync", result)
    }

    /// Copies to the host and waits.
    ///
    /// # Safety
    ///
    /// The stream's context is current. `from` is device memory of at least `to.len()` bytes, and
    /// nothing but work of this stream writes it meanwhile.
    pub(crate) unsafe fn copy_to_host(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: the target outlives the wait below; the rest is the caller's contract.
        unsafe { self.enqueue_copy_to_host(to.as_mut_ptr(), from, to.len())? };
        self.synchronize()
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    ///
    /// The contract is that of [`copy_to_host`](Self::copy_to_host); until the copy is done, source
    /// and target stay allocated and the target is neither read nor written.
    pub(crate) unsafe fn enqueue_copy_to_host(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller keeps the memory valid until the stream has done the operation.
        let result =
            unsafe { self.driver().cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw()) };
        check(self.driver(), "cuMemcpyDtoHAsync", result)
    }

    /// Enqueues a copy on the device.
    ///
    /// # Safety
    ///
    /// The stream's context is current. `to` and `from` are device memory of at least `bytes`
    /// bytes, which stays allocated and has no other user until the copy is done.
    pub(crate) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller keeps the memory valid until the stream has done the operation.
        let result = unsafe { self.driver().cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) };
        check(self.driver(), "cuMemcpyDtoDAsync", result)
    }

    /// Enqueues a fill: `count` elements, each with the 1, 2, 4 or 8 bytes of `value`.
    ///
    /// # Safety
    ///
    /// The stream's context is current. `to` is device memory of `count * value.len()` bytes,
    /// aligned for the value, which stays allocated and has no other user until the fill is done.
    pub(crate) unsafe fn fill(&self, to: u64, value: &[u8], count: usize) -> Result<()> {
        let (driver, stream) = (self.driver(), self.raw());
        // The driver has no fill with 8-byte elements: this fills one half of every element.
        let fill_half = |to, half| {
            let pitch = value.len();
            // SAFETY: the caller's contract; rows of one 32-bit word, `pitch` bytes apart.
            let result = unsafe { driver.cuMemsetD2D32Async(to, pitch, half, 1, count, stream) };
            check(driver, "cuMemsetD2D32Async", result)
        };
        match *value {
            [byte] => {
                // SAFETY: the caller keeps the memory valid until the stream has done the
                // operation.
                let result = unsafe { driver.cuMemsetD8Async(to, byte, count, stream) };
                check(driver, "cuMemsetD8Async", result)
            }
            [a, b] => {
                let value = u16::from_ne_bytes([a, b]);
                // SAFETY: the caller keeps the memory valid until the stream has done the
                // operation.
                let result = unsafe { driver.cuMemsetD16Async(to, value, count, stream) };
                check(driver, "cuMemsetD16Async", result)
            }
            [a, b, c, d] => {
                let value = u32::from_ne_bytes([a, b, c, d]);
                // SAFETY: the caller keeps the memory valid until the stream has done the
                // operation.
                let result = unsafe { driver.cuMemsetD32Async(to, value, count, stream) };
                check(driver, "cuMemsetD32Async", result)
            }
            [a, b, c, d, e, f, g, h] => {
                fill_half(to, u32::from_ne_bytes([a, b, c, d]))?;
                fill_half(to + 4, u32::from_ne_bytes([e, f, g, h]))
            }
            _ => unreachable!("elements have 1, 2, 4 or 8 bytes"),
        }
    }

    /// Waits without a timeout, for work that does not depend on other ranks.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is live.
        let waited = unsafe { self.driver().cuStreamSynchronize(self.raw()) };
        check(self.driver(), "cuStreamSynchronize", waited)
    }
}

/// Device memory. Dropping it leaves the memory allocated.
pub(crate) struct DeviceAllocation {
    driver: &'static Driver,
    address: CUdeviceptr,
}

impl PrimaryContext {
    /// Allocates device memory of `bytes` bytes, which must not be 0.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<DeviceAllocation> {
        self.bind()?;
        let (driver, mut address) = (self.driver, 0);
        // SAFETY: the context is current; `address` is live.
        let made = unsafe { driver.cuMemAlloc_v2(&raw mut address, bytes) };
        check(driver, "cuMemAlloc", made)?;
        Ok(DeviceAllocation { driver, address })
    }
}

impl DeviceAllocation {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Frees it.
    ///
    /// # Safety
    ///
    /// The context that it was allocated in is current, and nothing uses the memory.
    pub(crate) unsafe fn free(self) -> Result<()> {
        // SAFETY: allocated by `alloc` and not freed yet; the rest is the caller's contract.
        let freed = unsafe { self.driver.cuMemFree_v2(self.address) };
        check(self.driver, "cuMemFree", freed)
    }
}

/// Pinned host memory. Dropping it leaves the memory allocated.
pub(crate) struct HostAllocation {
    driver: &'static Driver,
    address: NonNull<u8>,
}

// SAFETY: pinned memory belongs to no thread; this type itself does not access it.
unsafe impl Send for HostAllocation {}
// SAFETY: a shared value does not access the memory.
unsafe impl Sync for HostAllocation {}

impl PrimaryContext {
    /// Allocates zeroed pinned memory of `bytes` bytes, which must not be 0.
    pub(crate) fn alloc_host(&self, bytes: usize) -> Result<HostAllocation> {
        self.bind()?;
        let (driver, mut address) = (self.driver, null_mut());
        // SAFETY: the context is current; `address` is live.
        let made = unsafe {
            driver.cuMemHostAlloc(&raw mut address, bytes, CU_MEMHOSTALLOC_PORTABLE as _)
        };
        check(driver, "cuMemHostAlloc", made)?;
        let address = NonNull::new(address.cast::<u8>());
        let address = address.ok_or_else(|| Error::invalid("cuMemHostAlloc returned NULL"))?;
        // SAFETY: fresh memory of that size, without other users.
        unsafe { address.write_bytes(0, bytes) };
        Ok(HostAllocation { driver, address })
    }
}

impl HostAllocation {
    pub(crate) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    /// Frees it.
    ///
    /// # Safety
    ///
    /// The context that it was allocated in is current, and neither the host nor a GPU uses it.
    pub(crate) unsafe fn free(self) -> Result<()> {
        // SAFETY: allocated by `alloc_host` and not freed yet; the rest is the caller's contract.
        let freed = unsafe { self.driver.cuMemFreeHost(self.address.as_ptr().cast()) };
        check(self.driver, "cuMemFreeHost", freed)
    }
}
