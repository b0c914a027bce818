//! Memory mapped at several addresses: as a buffer, and as parts of windows.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Allocation, GpuSet, Memory};
use crate::base::error::{Error, Result};
use crate::base::layout::POISON;
use crate::base::mapping::{Mapping, page_size};
use crate::base::owner::Owner;

/// The first canonical address of pages: above all addresses of a process, which are below 2^56
/// even with page tables of five levels.
const CANONICAL: usize = 1 << 56;
/// The number of bytes at the start of new memory that are poisoned. It is limited, since a program
/// may allocate much more than it uses, and pages that are written take memory of the host.
const POISONED: usize = 1 << 20;

/// Returns whether pages have this canonical address.
pub(super) fn is_canonical_of_pages(address: usize) -> bool {
    address >= CANONICAL
}

/// Pages that several addresses can map: an anonymous file.
pub(crate) struct Pages {
    file: File,
    /// The canonical address.
    canonical: usize,
}

impl Pages {
    fn new(len: usize) -> io::Result<Self> {
        // SAFETY: the name is a C string, and the flag is valid.
        let fd = unsafe { libc::memfd_create(c"devcomm".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64)?;
        static NEXT: AtomicUsize = AtomicUsize::new(CANONICAL);
        Ok(Self { file, canonical: NEXT.fetch_add(len, Ordering::Relaxed) })
    }
}

impl Mapping {
    /// Maps `len` bytes of `pages` from `start` at `offset`. All are multiples of the page size.
    fn map(&self, offset: usize, len: usize, pages: &Pages, start: usize) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "the pages lie in the mapping");
        // SAFETY: the range lies in this mapping, which unmaps it; no reference to it exists.
        let mapped = unsafe {
            libc::mmap(
                self.base.add(offset).cast(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                pages.file.as_raw_fd(),
                start as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// One rank's part of a window: `bytes` bytes of `pages`, from the page at `start`.
pub(crate) struct WindowPart {
    pub(crate) pages: Rc<Pages>,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Allocation {
    /// Returns page-aligned memory of `gpu` that windows can map, poisoned.
    pub(crate) fn shareable(
        memory: &Rc<Memory>,
        gpu: u32,
        bytes: usize,
        owner: Owner,
    ) -> Result<(Self, Rc<Pages>)> {
        let page = page_size();
        let refused = |source| Error::Memory { bytes, ranks: 1, source };
        let (mapping, open) = Mapping::with_guard_pages(bytes).map_err(refused)?;
        let pages = Pages::new(open).map_err(refused)?;
        mapping.map(page, open, &pages, 0).map_err(refused)?;
        let part = mapping.base().wrapping_add(page);
        for word in 0..open.min(POISONED) / size_of::<u32>() {
            // SAFETY: the pages are mapped, and nothing else uses them yet.
            unsafe { part.cast::<u32>().add(word).write(POISON) };
        }
        let gpus = std::iter::once(gpu).collect::<GpuSet>();
        memory.insert_at(part, pages.canonical, bytes, gpus, owner);
        let (lens, memory) = ([bytes].into(), Rc::clone(memory));
        let parts = vec![part];
        let new = Self { parts, lens, stride: 0, mc_offset_4k: None, memory, _mapping: mapping };
        Ok((new, Rc::new(pages)))
    }

    /// Does the same as [`symmetric`](Self::symmetric), but maps existing pages.
    pub(crate) fn window(
        memory: &Rc<Memory>,
        gpus: &Rc<[u32]>,
        team: usize,
        parts: &[WindowPart],
        owner: impl Fn(usize) -> Owner,
    ) -> Result<Self> {
        let lens = parts.iter().map(|part| part.bytes).collect();
        let open = |mapping: &Mapping, rank: usize, offset, len| {
            mapping.map(offset, len, &parts[rank].pages, parts[rank].start)
        };
        let canonical = |rank: usize| Some(parts[rank].pages.canonical + parts[rank].start);
        Self::lay_out(memory, gpus, team, lens, owner, open, canonical)
    }
}
