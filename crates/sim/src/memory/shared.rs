//! Memory that is mapped at several addresses: at its GPU's own, and as a part of windows.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::rc::Rc;

use super::{Allocation, GpuSet, Mapping, Memory, Owner, page_size};
use crate::error::{Error, Result};

/// The bytes behind all mappings: pages that no file system has. New ones are zero.
pub(crate) struct Pages(File);

impl Pages {
    fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a name, and a flag that it knows.
        let fd = unsafe { libc::memfd_create(c"devcomm".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, which nobody else has.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64)?;
        Ok(Self(file))
    }
}

impl Mapping {
    /// Puts `len` bytes of `pages` from `start` at `offset`. All are whole pages.
    fn map(&self, offset: usize, len: usize, pages: &Pages, start: usize) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "the pages lie in the mapping");
        // SAFETY: the range lies in this mapping, to which no reference exists, and ends with it.
        let mapped = unsafe {
            libc::mmap(
                self.base.add(offset).cast(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                pages.0.as_raw_fd(),
                start as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// One rank's part of a window: `bytes` of `pages`, from the page at `start` on.
pub(crate) struct Part {
    pub(crate) pages: Rc<Pages>,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Allocation {
    /// Memory of `gpu` alone that can become part of windows. It begins with a page.
    pub(crate) fn shareable(
        memory: &Rc<Memory>,
        gpu: u32,
        bytes: usize,
        owner: Owner,
    ) -> Result<(Self, Rc<Pages>)> {
        let page = page_size();
        let refused = |source| Error::Memory { bytes, ranks: 1, source };
        let (mapping, open) = Mapping::of_one_part(bytes).map_err(refused)?;
        let pages = Pages::new(open).map_err(refused)?;
        mapping.map(page, open, &pages, 0).map_err(refused)?;
        let part = mapping.base().wrapping_add(page);
        memory.insert(part, bytes, std::iter::once(gpu).collect::<GpuSet>(), owner);
        let (lens, memory) = ([bytes].into(), Rc::clone(memory));
        let parts = vec![part];
        let own = Self { parts, lens, stride: 0, place: None, memory, _mapping: mapping };
        Ok((own, Rc::new(pages)))
    }

    /// As [`symmetric`](Self::symmetric), of memory that is there.
    pub(crate) fn window(
        memory: &Rc<Memory>,
        gpus: &Rc<[u32]>,
        team: usize,
        parts: &[Part],
        owner: impl Fn(usize) -> Owner,
    ) -> Result<Self> {
        let lens = parts.iter().map(|part| part.bytes).collect();
        Self::lay_out(memory, gpus, team, lens, owner, |mapping, rank, offset, len| {
            mapping.map(offset, len, &parts[rank].pages, parts[rank].start)
        })
    }
}
