//! Simulated device memory: mappings surrounded by unmapped pages, and a registry of live memory.
//!
//! A window has NCCL's layout, with which kernels compute peer pointers: one reservation of address
//! space, in which the part of rank `r` starts `r * stride * 4 GiB` after that of rank 0. The rest
//! of the reservation is unmapped. A buffer ends at an unmapped page.
//!
//! # Safety
//!
//! Only dropping a [`Mapping`] unmaps it. A range in the registry lies in a live mapping, because
//! dropping an [`Allocation`] removes the range first. Kernels write to this memory while they run,
//! so the host never creates a reference into it: it copies.

pub(crate) mod multicast;
mod shared;
pub(crate) mod traffic;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::rc::Rc;

use litemap::LiteMap;

use self::multicast::Multicast;
use self::shared::is_canonical_of_pages;
pub(crate) use self::shared::{Pages, WindowPart};
use crate::base::arguments::Arguments;
use crate::base::error::{Error, Result};
use crate::base::layout::STRIDE_UNIT;
use crate::base::mapping::{Mapping, page_size};
use crate::base::owner::{Owner, Registry};
use crate::base::ranges::last_until;
use crate::race::Races;

/// Alignment of a buffer, as from `cudaMalloc`.
const BUFFER_ALIGN: usize = 256;

/// A set of GPUs.
#[derive(Clone, Debug)]
pub(crate) struct GpuSet(Rc<[Run]>);

/// Consecutive GPUs: the first, and their number.
type Run = (u32, u32);

impl GpuSet {
    /// Returns every GPU, for host memory.
    pub(crate) fn all() -> Self {
        Self([(0, u32::MAX)].into())
    }

    /// Returns the run that contains `gpu`.
    fn run_of(&self, gpu: u32) -> Option<Run> {
        let next = self.0.partition_point(|(first, _)| *first <= gpu);
        let (first, n) = self.0[next.checked_sub(1)?];
        (gpu - first < n).then_some((first, n))
    }
}

impl FromIterator<u32> for GpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(gpus: I) -> Self {
        let gpus: BTreeSet<u32> = gpus.into_iter().collect();
        let mut runs: Vec<Run> = Vec::new();
        for gpu in gpus {
            match runs.last_mut() {
                Some((first, n)) if *first + *n == gpu => *n += 1,
                _ => runs.push((gpu, 1)),
            }
        }
        Self(runs.into())
    }
}

/// The registry's entry for a live range, whose start is the entry's key.
struct LiveMemory {
    end: usize,
    /// The start's canonical address: the same for all mappings of the same memory.
    canonical: usize,
    /// The GPUs that may access the memory.
    gpus: GpuSet,
    owner: Owner,
}

/// Memory that was freed, for reports.
struct Freed {
    start: usize,
    end: usize,
    owner: Owner,
}

/// The number of freed ranges that are remembered.
const MAX_FREED: usize = 1 << 10;

/// A live memory range, and a run of GPUs that may access it.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    start: usize,
    end: usize,
    gpus: Run,
}

impl Range {
    #[inline(always)]
    fn contains(&self, gpu: u32, address: usize, bytes: usize) -> bool {
        // An address before the start wraps to a large offset.
        address.wrapping_sub(self.start) < self.end - self.start
            && bytes <= self.end - address
            && gpu.wrapping_sub(self.gpus.0) < self.gpus.1
    }
}

/// The number of entries in the cache of lookups is 2 to the power of this.
const CACHE_BITS: u32 = 8;

/// The registry of live memory, with a small cache of recent lookups.
pub(crate) struct Memory {
    /// Live ranges by start address.
    live: RefCell<LiteMap<usize, LiveMemory>>,
    /// The latest freed ranges.
    freed: RefCell<VecDeque<Freed>>,
    cache: Box<[Cell<Range>]>,
    pub(crate) multicast: Multicast,
    pub(crate) races: Races,
}

impl Memory {
    pub(crate) fn new(races: Races) -> Self {
        let cache = vec![Cell::default(); 1 << CACHE_BITS].into();
        let (live, freed, multicast) = Default::default();
        Self { live, freed, cache, multicast, races }
    }

    /// Registers `bytes` from `start`, which `gpus` may access. They must not overlap other live
    /// memory.
    pub(crate) fn insert(&self, start: *mut u8, bytes: usize, gpus: GpuSet, owner: Owner) {
        self.insert_at(start, start.addr(), bytes, gpus, owner);
    }

    /// Does the same as [`insert`](Self::insert), for memory that is mapped at several addresses:
    /// all its mappings have the same canonical addresses.
    fn insert_at(
        &self,
        start: *mut u8,
        canonical: usize,
        bytes: usize,
        gpus: GpuSet,
        owner: Owner,
    ) {
        let live = LiveMemory { end: start.addr() + bytes, canonical, gpus, owner };
        self.freed.borrow_mut().retain(|old| old.end <= start.addr() || old.start >= live.end);
        self.live.borrow_mut().insert(start.addr(), live);
        self.races.remap();
    }

    /// Unregisters the memory that starts at `start`.
    pub(crate) fn remove(&self, start: usize) {
        let removed = self.live.borrow_mut().remove(&start);
        if let Some(LiveMemory { end, owner, .. }) = removed {
            let mut freed = self.freed.borrow_mut();
            freed.push_front(Freed { start, end, owner });
            freed.truncate(MAX_FREED);
        }
        self.cache.iter().for_each(|entry| entry.set(Range::default()));
        // A window's memory may be mapped at another address, where it is still in use.
        match removed.filter(|live| !matches!(live.owner, Owner::Window { .. })) {
            Some(live) => self.races.forget(live.canonical, live.end - start),
            None => self.races.remap(),
        }
    }

    /// Returns the cache entry for this address: one per 64 KiB of address space.
    #[inline(always)]
    fn entry(&self, address: usize) -> &Cell<Range> {
        // The multiplication is a hash.
        let slot =
            ((address >> 16) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CACHE_BITS);
        &self.cache[slot as usize]
    }

    /// Returns whether [`contains`](Self::contains) has lately found that `gpu` may access these
    /// bytes.
    #[inline(always)]
    pub(crate) fn was_found(&self, gpu: u32, address: usize, bytes: usize) -> bool {
        self.entry(address).get().contains(gpu, address, bytes)
    }

    /// Returns whether `address..address + bytes` lies in one live range that `gpu` may access.
    pub(crate) fn contains(&self, gpu: u32, address: usize, bytes: usize) -> bool {
        self.was_found(gpu, address, bytes) || self.find(gpu, address, bytes)
    }

    #[cold]
    fn find(&self, gpu: u32, address: usize, bytes: usize) -> bool {
        let all = self.live.borrow();
        let before = last_until(&all, address);
        let range = before.and_then(|(start, live)| {
            Some(Range { start: *start, end: live.end, gpus: live.gpus.run_of(gpu)? })
        });
        match range.filter(|range| range.contains(gpu, address, bytes)) {
            Some(range) => {
                self.entry(address).set(range);
                true
            }
            None => false,
        }
    }

    /// Returns whether `address..address + bytes` lies in one live range.
    pub(crate) fn is_live(&self, address: usize, bytes: usize) -> bool {
        let all = self.live.borrow();
        let before = last_until(&all, address);
        before.is_some_and(|(_, live)| address <= live.end && bytes <= live.end - address)
    }

    /// Returns the owner of the live memory that starts at `start`.
    pub(crate) fn owner(&self, start: usize) -> Option<Owner> {
        self.live.borrow().get(&start).map(|live| live.owner)
    }

    /// Returns the distance in bytes of an address from the nearest memory of a window or buffer,
    /// live or freed.
    pub(crate) fn distance(&self, address: usize) -> Option<usize> {
        let far = |start: usize, end: usize| {
            // The distance of `end` is 1. (No memory ends at 0, but an address may be the largest.)
            if address < start { start - address } else { address.saturating_sub(end - 1) }
        };
        let (live, freed) = (self.live.borrow(), self.freed.borrow());
        let live = live.iter().map(|(start, live)| far(*start, live.end));
        live.chain(freed.iter().map(|old| far(old.start, old.end))).min()
    }

    /// Describes `address` relative to live memory, to which `arguments` refer.
    pub(crate) fn describe(&self, address: usize, arguments: &Arguments) -> String {
        let all = self.live.borrow();
        let before = last_until(&all, address);
        let after = match all.find_index(&address) {
            Ok(at) => all.get_indexed(at + 1),
            Err(next) => all.get_indexed(next),
        };
        if let Some((start, LiveMemory { end, owner, .. })) = before
            && address < *end
        {
            let owner = arguments.name(*owner, address - start);
            return format!("in {owner}, which the rank cannot access or the access exceeds");
        }
        let freed = self.freed.borrow();
        if let Some(old) = freed.iter().find(|old| (old.start..old.end).contains(&address)) {
            let owner = arguments.name(old.owner, address - old.start);
            return format!("in {owner}, {}", old.owner.freed_by());
        }
        if let Some((start, LiveMemory { end, owner, .. })) = before {
            let distance = address - end;
            if after.is_none_or(|(next, _)| distance <= next - address) {
                let owner = arguments.name(*owner, end - start);
                return format!("{distance} bytes after the end of {owner}, {} bytes", end - start);
            }
        }
        match after {
            Some((start, live)) => {
                format!("{} bytes before {}", start - address, arguments.name(live.owner, 0))
            }
            None => "while no window or buffer exists".to_owned(),
        }
    }
}

impl Registry for Memory {
    fn canonical(&self, address: usize) -> usize {
        let all = self.live.borrow();
        // The last page of a mapping belongs to it up to its end, also after the live range.
        let found = last_until(&all, address)
            .filter(|(_, live)| address < live.end.next_multiple_of(page_size()));
        found.map_or(address, |(start, live)| live.canonical + (address - start))
    }

    fn is_of_nccl(&self, address: usize) -> bool {
        is_canonical_of_pages(self.canonical(address))
    }

    fn owner_at(&self, address: usize) -> Option<(Owner, usize)> {
        let all = self.live.borrow();
        let (start, live) = last_until(&all, address).filter(|(_, live)| address < live.end)?;
        Some((live.owner, address - start))
    }

    fn owners_at(&self, address: usize) -> Vec<(Owner, usize)> {
        let canonical = self.canonical(address);
        let owner_of = |(start, live): (&usize, &LiveMemory)| {
            let offset = canonical.checked_sub(live.canonical)?;
            (offset < live.end - start).then_some((live.owner, offset))
        };
        let mut all: Vec<_> = self.live.borrow().iter().filter_map(owner_of).collect();
        // The owner at this address comes first.
        let here = self.owner_at(address);
        all.sort_by_key(|owner| Some(*owner) != here);
        all
    }
}

/// Memory of one or more ranks, live until dropped.
pub(crate) struct Allocation {
    parts: Vec<*mut u8>,
    /// Length of each part in bytes.
    lens: Rc<[usize]>,
    stride: usize,
    /// Offset in multicast groups in units of 4 KiB; `None` for a buffer.
    mc_offset_4k: Option<u32>,
    memory: Rc<Memory>,
    _mapping: Mapping,
}

impl Allocation {
    /// Returns one part per rank in NCCL's window layout; rank `i` is on `gpus[i]`, and `team`
    /// consecutive ranks can access each other's parts.
    pub(crate) fn symmetric(
        memory: &Rc<Memory>,
        gpus: &Rc<[u32]>,
        team: usize,
        bytes: usize,
        owner: impl Fn(usize) -> Owner,
    ) -> Result<Self> {
        let lens = gpus.iter().map(|_| bytes).collect();
        let open = |mapping: &Mapping, _, offset, len| mapping.open(offset, len);
        Self::lay_out(memory, gpus, team, lens, owner, open, |_| None)
    }

    /// Allocates parts of these lengths in window layout; `open(mapping, rank, offset, len)` makes
    /// the pages of `rank`'s part accessible, `canonical(rank)` is its canonical address.
    fn lay_out(
        memory: &Rc<Memory>,
        gpus: &Rc<[u32]>,
        team: usize,
        lens: Rc<[usize]>,
        owner: impl Fn(usize) -> Owner,
        open: impl Fn(&Mapping, usize, usize, usize) -> io::Result<()>,
        canonical: impl Fn(usize) -> Option<usize>,
    ) -> Result<Self> {
        let (page, ranks) = (page_size(), gpus.len());
        let bytes = lens.iter().copied().max().unwrap_or(0);
        let refused = |source| Error::Memory { bytes, ranks, source };
        let too_large = || refused(io::Error::from(io::ErrorKind::OutOfMemory));
        let pages = |bytes: usize| bytes.checked_next_multiple_of(page).map(|len| len.max(page));
        let stride = pages(bytes).and_then(|len| len.checked_add(page));
        let stride = stride.and_then(|len| len.checked_next_multiple_of(STRIDE_UNIT));
        let stride = stride.ok_or_else(too_large)?;
        let len = stride.checked_mul(ranks).ok_or_else(too_large)?;
        let mapping = Mapping::reserve(len).map_err(refused)?;
        let mut parts = Vec::with_capacity(ranks);
        for (rank, bytes) in lens.iter().enumerate() {
            let len = pages(*bytes).ok_or_else(too_large)?;
            open(&mapping, rank, rank * stride, len).map_err(refused)?;
            parts.push(mapping.base().wrapping_add(rank * stride));
        }
        let mc_offset_4k =
            memory.multicast.bind(gpus, parts[0], stride, &lens).ok_or_else(too_large)?;
        for (i, (parts, gpus)) in parts.chunks(team).zip(gpus.chunks(team)).enumerate() {
            let gpus: GpuSet = gpus.iter().copied().collect();
            for (rank, part) in (i * team..).zip(parts) {
                let canonical = canonical(rank).unwrap_or(part.addr());
                memory.insert_at(*part, canonical, lens[rank], gpus.clone(), owner(rank));
            }
        }
        let (mc_offset_4k, memory) = (Some(mc_offset_4k), Rc::clone(memory));
        Ok(Self { parts, lens, stride, mc_offset_4k, memory, _mapping: mapping })
    }

    /// Returns one part that `gpus` may access, ending at an inaccessible page (up to alignment).
    pub(crate) fn single(
        memory: &Rc<Memory>,
        gpus: GpuSet,
        bytes: usize,
        owner: Owner,
    ) -> Result<Self> {
        let page = page_size();
        let refused = |source| Error::Memory { bytes, ranks: 1, source };
        let (mapping, open) = Mapping::with_guard_pages(bytes).map_err(refused)?;
        mapping.open(page, open).map_err(refused)?;
        let start = page + open - bytes.next_multiple_of(BUFFER_ALIGN);
        let part = mapping.base().wrapping_add(start);
        memory.insert(part, bytes, gpus, owner);
        let memory = Rc::clone(memory);
        let (parts, lens) = (vec![part], [bytes].into());
        Ok(Self { parts, lens, stride: 0, mc_offset_4k: None, memory, _mapping: mapping })
    }

    /// Returns the address of `rank`'s part.
    pub(crate) fn part(&self, rank: usize) -> *mut u8 {
        self.parts[rank]
    }

    /// Returns the distance between two ranks' parts in units of 4 GiB.
    pub(crate) fn stride_4g(&self) -> u32 {
        (self.stride / STRIDE_UNIT) as u32
    }

    /// Returns the length of each part in bytes.
    pub(crate) fn lens(&self) -> &Rc<[usize]> {
        &self.lens
    }

    /// Returns the offset in multicast groups in units of 4 KiB; 0 for a buffer.
    pub(crate) fn mc_offset_4k(&self) -> u32 {
        self.mc_offset_4k.unwrap_or(0)
    }

    /// Removes `rank`'s part from the registry, so that an access of a kernel is an error; its
    /// pages stay mapped.
    pub(crate) fn close(&self, rank: usize) {
        self.memory.remove(self.parts[rank].addr());
    }

    /// Sets every byte of `rank`'s part to zero.
    pub(crate) fn zero(&self, rank: usize) {
        // SAFETY: the part has this length. Kernels run on this thread, so none runs now.
        unsafe { self.parts[rank].write_bytes(0, self.lens[rank]) };
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        for part in &self.parts {
            self.memory.remove(part.addr());
        }
        if let Some(mc_offset_4k) = self.mc_offset_4k {
            self.memory.multicast.remove(mc_offset_4k);
        }
    }
}
