//! Mappings: reserved address space, whose pages can be made accessible.

use std::io;
use std::sync::LazyLock;

/// Returns the size of a page in bytes.
pub(crate) fn page_size() -> usize {
    static SIZE: LazyLock<usize> = LazyLock::new(|| {
        // SAFETY: the call has no preconditions: it returns a number.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).unwrap_or(4096)
    });
    *SIZE
}

/// Reserved address space, initially inaccessible.
pub(crate) struct Mapping {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: the address space belongs to the process, not to a thread.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Reserves `len` bytes, a multiple of the page size.
    pub(crate) fn reserve(len: usize) -> io::Result<Self> {
        // SAFETY: a new private mapping at an address that the system chooses affects no existing
        // one.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), len })
    }

    /// Reserves whole pages for `bytes`, with a guard page on each side. Also returns the size
    /// without the guard pages.
    pub(crate) fn with_guard_pages(bytes: usize) -> io::Result<(Self, usize)> {
        let page = page_size();
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let open = bytes.checked_next_multiple_of(page).ok_or_else(too_large)?.max(page);
        let mapping = Self::reserve(open.checked_add(2 * page).ok_or_else(too_large)?)?;
        Ok((mapping, open))
    }

    /// Makes `len` bytes from `offset` accessible. Both are multiples of the page size.
    pub(crate) fn open(&self, offset: usize, len: usize) -> io::Result<()> {
        self.protect(offset, len, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Makes `len` bytes from `offset` inaccessible. Both are multiples of the page size.
    pub(crate) fn close(&self, offset: usize, len: usize) -> io::Result<()> {
        self.protect(offset, len, libc::PROT_NONE)
    }

    fn protect(&self, offset: usize, len: usize, rights: libc::c_int) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "the pages lie in the mapping");
        // SAFETY: the range lies in this mapping, to which no reference exists.
        if unsafe { libc::mprotect(self.base.add(offset).cast(), len, rights) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Calls `madvise` on `len` bytes from `offset`; `false` if Linux does not know the hint.
    pub(crate) fn advise(&self, offset: usize, len: usize, advice: i32) -> bool {
        assert!(offset <= self.len && len <= self.len - offset, "the pages lie in the mapping");
        // SAFETY: the range lies in this mapping, to which no reference exists; the hints in use
        // (no huge pages, guard page) affect no other memory.
        unsafe { libc::madvise(self.base.add(offset).cast(), len, advice) == 0 }
    }

    /// Returns the address of the first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object owns the mapping. Failure is not expected and cannot be handled.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
