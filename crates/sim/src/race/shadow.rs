//! Shadow memory: the last accesses to each 4-byte word of the memory that kernels have accessed.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::panic::Location;

use cuda_std::arch::Scope;

use super::clock::{Agent, OpId, THREADS};
use crate::base::error::Site;
use crate::base::owner::Registry;

/// The number of bytes of memory per page of shadow memory.
pub(super) const PAGE: usize = 1 << 10;
const WORDS: usize = PAGE / 4;

/// How an access conflicts with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) writes: bool,
    /// The scope of an atomic or ordered access; `None` for a weak one.
    pub(super) scope: Option<Scope>,
    /// Whether the access is made through the asynchronous proxy.
    pub(super) is_async: bool,
}

/// An access to a word, packed into 16 bytes. From the highest bit on, the first number has the
/// operation (27 bits; from 1, so that 0 is no access), the block (24) and the agent (13). The
/// second one has the time (32 bits), the site (16), the copy (4), the bytes of the word (4), its
/// initialised bytes (4) and the kind (4).
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Stamp(u64, u64);

/// No access.
pub(super) const NO_STAMP: Stamp = Stamp(0, 0);

const BLOCK_BITS: u32 = 24;
const AGENT_BITS: u32 = 13;

/// The most blocks of a grid whose accesses have numbers of their own.
pub(crate) const MAX_BLOCKS: u32 = 1 << BLOCK_BITS;

/// The most operations whose accesses have numbers of their own.
pub(super) const MAX_OPS: u32 = (1 << (u64::BITS - BLOCK_BITS - AGENT_BITS)) - 1;

/// The number of asynchronous copies in a row that have different numbers, which fit in 4 bits:
/// rings of copies have other lengths, most often powers of two.
pub(super) const TOLD_APART: u8 = 13;

impl Stamp {
    #[inline]
    pub(super) fn new(agent: Agent, time: u32, site: SiteId, kind: Kind) -> Self {
        let block = u64::from(agent.block);
        let scope = match kind.scope {
            None => 0,
            Some(Scope::Cta) => 1,
            Some(Scope::Gpu) => 2,
            Some(Scope::Sys) => 3,
        };
        let kind = scope | u64::from(kind.writes) << 2 | u64::from(kind.is_async) << 3;
        Self(
            (u64::from(agent.op.0) << BLOCK_BITS | block) << AGENT_BITS | u64::from(agent.number),
            u64::from(time) << 32 | u64::from(site.0) << 16 | kind,
        )
    }

    /// Returns the same access to these bytes of a word.
    #[inline]
    pub(super) fn of_bytes(self, bytes: u8) -> Self {
        Self(self.0, self.1 & !(0xf << 8) | u64::from(bytes) << 8)
    }

    /// Returns the same access as a part of the asynchronous copy with this number, which is below
    /// [`TOLD_APART`].
    #[inline]
    pub(super) fn of_copy(self, number: u8) -> Self {
        Self(self.0, self.1 | u64::from(number) << 12)
    }

    /// Returns whether both, of one agent, are parts of one asynchronous copy. All accesses of a
    /// thread are alike in this.
    #[inline]
    pub(super) fn is_same_copy(self, other: Self) -> bool {
        let is_same_time = self.time() == other.time() || self.agent().number < THREADS;
        is_same_time && (self.1 ^ other.1) >> 12 & 0xf == 0
    }

    #[inline]
    pub(super) fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Returns whether it is neither atomic nor ordered.
    #[inline]
    pub(super) fn is_weak(self) -> bool {
        self.1 & 3 == 0
    }

    /// Returns whether both are accesses by the same agent.
    #[inline]
    pub(super) fn is_same_agent(self, other: Self) -> bool {
        self.0 == other.0
    }

    /// Returns whether both have the same time, copy, kind and bytes.
    #[inline]
    pub(super) fn is_same_access(self, other: Self) -> bool {
        (self.1 ^ other.1) & !(0xffff << 16 | 0xf << 4) == 0
    }

    /// Returns the same access to the bytes of `last` too, if only these tell the two apart.
    #[inline]
    pub(super) fn joined(self, last: Self) -> Self {
        let is_alike = self.is_same_agent(last) && (self.1 ^ last.1) & !(0xff << 4) == 0;
        if is_alike { self.of_bytes(self.bytes() | last.bytes()) } else { self }
    }

    /// Returns whether what conflicts with `before`, an access of the same agent or one that is
    /// ordered before this one, also conflicts with this one: it has all bytes of `before`, and
    /// neither is it an atomic access after a weak one, nor is its scope wider.
    #[inline]
    pub(super) fn stands_for(self, before: Self) -> bool {
        // A weak access has scope 0; wider scopes have larger numbers.
        let is_weaker = self.1 & 3 <= before.1 & 3;
        before.bytes() & !self.bytes() == 0 && (is_weaker || before.is_none())
    }

    /// Returns what the order of this access and others depends on: its agent, and its time and
    /// kind without its site, copy and bytes.
    #[inline]
    pub(super) fn order_key(self) -> (u64, u64) {
        (self.0, self.1 & !(0xffff << 16 | 0xfff << 4))
    }

    /// Returns a write of these bytes after `last`, the last write of the word.
    #[inline]
    pub(super) fn after(self, last: Self) -> Self {
        Self(self.0, self.1 | (u64::from(self.bytes() | last.initialised()) << 4))
    }

    /// Returns the bytes of the word that this write and those before it have initialised, a bit
    /// each.
    #[inline]
    pub(super) fn initialised(self) -> u8 {
        (self.1 >> 4) as u8 & 0xf
    }

    /// Returns the bytes of the word, a bit each.
    #[inline]
    pub(super) fn bytes(self) -> u8 {
        (self.1 >> 8) as u8 & 0xf
    }

    #[inline]
    pub(super) fn agent(self) -> Agent {
        let number = (self.0 & ((1 << AGENT_BITS) - 1)) as u16;
        let block = (self.0 >> AGENT_BITS) as u32 & ((1 << BLOCK_BITS) - 1);
        Agent { op: OpId((self.0 >> (AGENT_BITS + BLOCK_BITS)) as u32), block, number }
    }

    #[inline]
    pub(super) fn time(self) -> u32 {
        (self.1 >> 32) as u32
    }

    pub(super) fn site(self) -> SiteId {
        SiteId((self.1 >> 16) as u16)
    }

    #[inline]
    pub(super) fn kind(self) -> Kind {
        let scope = match self.1 & 3 {
            0 => None,
            1 => Some(Scope::Cta),
            2 => Some(Scope::Gpu),
            _ => Some(Scope::Sys),
        };
        Kind { writes: self.1 & 4 != 0, scope, is_async: self.1 & 8 != 0 }
    }
}

/// The last accesses to a word.
#[derive(Clone, Copy, Default)]
pub(super) struct Word {
    pub(super) write: Stamp,
    /// Accesses whose conflicts the last write does not stand for: reads since it, writes of other
    /// bytes, and, before an atomic one, weak accesses, and atomic ones that nothing orders before
    /// it or whose scopes are narrower. Of more of them, later ones replace some.
    pub(super) others: [Stamp; 2],
}

/// Adds an access to the others of a word. If there is no place, it takes that of an atomic one, or
/// else of a read, or else of any; an atomic access takes none of a weak one, which conflicts with
/// more. Of accesses that conflict with as many, a random one is forgotten, so that no race is
/// missed in all schedules; `random` is the last random number.
pub(super) fn keep(others: &mut [Stamp; 2], stamp: Stamp, random: &Cell<u64>) {
    if stamp.is_none() {
        return;
    }
    // The multiplier and the increment of Knuth's MMIX.
    let number = random.get().wrapping_mul(0x5851_f42d_4c95_7f2d);
    let number = number.wrapping_add(0x1405_7b7e_f767_814f);
    random.set(number);
    let first = (number >> 63) as usize;
    let mut places = [first, 1 - first];
    let key = |other: Stamp| (!other.is_none(), other.is_weak(), other.kind().writes);
    places.sort_by_key(|at| key(others[*at]));
    let place = &mut others[places[0]];
    let is_equal = !place.is_none() && key(*place) == key(stamp);
    let is_forgotten = is_equal && (number >> 61).is_multiple_of(4);
    if !is_forgotten && (stamp.is_weak() || place.is_none() || !place.is_weak()) {
        *place = stamp;
    }
}

pub(super) type Page = [Cell<Word>; WORDS];

/// A hasher for numbers: one multiplication.
#[derive(Default)]
pub(super) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are single numbers")
    }

    fn write_usize(&mut self, number: usize) {
        let product = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

/// A map from numbers.
pub(super) type NumberMap<V> = HashMap<usize, V, BuildHasherDefault<NumberHasher>>;

/// Removes the keys of a range, which are multiples of `step` after its start.
pub(super) fn remove_range<V>(map: &mut NumberMap<V>, range: Range<usize>, step: usize) {
    if range.len() / step < map.len() {
        range.step_by(step).for_each(|key| drop(map.remove(&key)));
    } else {
        map.retain(|key, _| !range.contains(key));
    }
}

/// The number of entries in the cache of pages is 2 to the power of this.
const CACHE_BITS: u32 = 12;

/// All shadow memory, by the address of the memory. Its pages are reused, but never freed.
pub(super) struct Shadow {
    pages: RefCell<NumberMap<Box<Page>>>,
    /// Pages whose words all have the same accesses: those of copies.
    uniform: RefCell<NumberMap<Word>>,
    free: RefCell<Vec<Box<Page>>>,
    /// Recently used pages by the number of the page of memory.
    cache: Box<[Cell<Cached>]>,
}

/// A page of memory: its number, the number of its shadow page, and the shadow page. The numbers
/// differ for memory that is mapped at several addresses.
type Cached = (usize, usize, *const Page);

const NO_PAGE: Cached = (usize::MAX, 0, std::ptr::null());

impl Default for Shadow {
    fn default() -> Self {
        let (pages, uniform, free) = Default::default();
        Self { pages, uniform, free, cache: vec![Cell::new(NO_PAGE); 1 << CACHE_BITS].into() }
    }
}

impl Shadow {
    #[inline]
    fn page(&self, number: usize, memory: &dyn Registry) -> Cached {
        // A hash, since parts of a window are powers of two apart.
        let slot = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - CACHE_BITS);
        let entry = &self.cache[slot as usize];
        let mut found = entry.get();
        if found.0 != number {
            let shadow = memory.canonical(number * PAGE) / PAGE;
            found = (number, shadow, self.find(shadow));
            entry.set(found);
        }
        found
    }

    #[cold]
    fn find(&self, number: usize) -> *const Page {
        let mut pages = self.pages.borrow_mut();
        let page = pages.entry(number).or_insert_with(|| {
            let free = self.free.borrow_mut().pop();
            let page: Box<Page> = free.unwrap_or_else(|| {
                let words = vec![Cell::new(Word::default()); WORDS].into_boxed_slice();
                words.try_into().unwrap_or_else(|_| unreachable!("a page has this many words"))
            });
            if let Some(word) = self.uniform.borrow_mut().remove(&number) {
                page.iter().for_each(|other| other.set(word));
            }
            page
        });
        std::ptr::from_ref::<Page>(page)
    }

    /// Returns the accesses that all words of the page at `address` have, if they are the same.
    pub(super) fn uniform(
        &self,
        address: usize,
        memory: &dyn Registry,
    ) -> Option<RefMut<'_, Word>> {
        let number = memory.canonical(address) / PAGE;
        if self.pages.borrow().contains_key(&number) {
            return None;
        }
        let uniform = self.uniform.borrow_mut();
        Some(RefMut::map(uniform, |uniform| uniform.entry(number).or_default()))
    }

    /// Returns the word at `address`, which is rounded down.
    #[inline]
    pub(super) fn word(&self, address: usize, memory: &dyn Registry) -> &Cell<Word> {
        let (_, _, page) = self.page(address / PAGE, memory);
        // SAFETY: the boxes live as long as this object, and their content is in cells.
        unsafe { &(*page)[address % PAGE / 4] }
    }

    /// Returns the address that stands for all addresses of the memory at `address`.
    pub(super) fn canonical(&self, address: usize, memory: &dyn Registry) -> usize {
        self.page(address / PAGE, memory).1 * PAGE + address % PAGE
    }

    /// Forgets where memory is.
    pub(super) fn remap(&self) {
        self.cache.iter().for_each(|entry| entry.set(NO_PAGE));
    }

    /// Forgets the accesses to memory that is used anew.
    pub(super) fn forget(&self, start: usize, bytes: usize) {
        let end = start + bytes;
        let (first, last) = (start / PAGE, end.div_ceil(PAGE));
        remove_range(&mut self.uniform.borrow_mut(), first..last, 1);
        let mut pages = self.pages.borrow_mut();
        let numbers: Vec<usize> = if last - first < pages.len() {
            (first..last).filter(|number| pages.contains_key(number)).collect()
        } else {
            pages.keys().copied().filter(|number| (first..last).contains(number)).collect()
        };
        for number in numbers {
            let base = number * PAGE;
            let words = start.max(base) - base..end.min(base + PAGE) - base;
            let is_whole = words.len() == PAGE;
            let page = &pages[&number];
            page[words.start / 4..words.end.div_ceil(4)]
                .iter()
                .for_each(|word| word.set(Word::default()));
            if is_whole {
                self.free.borrow_mut().extend(pages.remove(&number));
            }
        }
        self.remap();
    }
}

/// Identifies a call site; 0 is none.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SiteId(u16);

/// Call sites by number.
pub(super) struct Sites {
    all: RefCell<Vec<Site>>,
    numbers: RefCell<NumberMap<SiteId>>,
    /// Recently used sites, by address.
    cache: [Cell<(usize, SiteId)>; 64],
}

impl Default for Sites {
    fn default() -> Self {
        Self {
            all: RefCell::default(),
            numbers: RefCell::default(),
            cache: std::array::from_fn(|_| Cell::default()),
        }
    }
}

impl Sites {
    #[inline]
    pub(super) fn number(&self, site: Site) -> SiteId {
        let key = std::ptr::from_ref::<Location<'_>>(site).addr();
        let cached = &self.cache[key / 8 % 64];
        let (found, mut id) = cached.get();
        if found != key {
            id = self.find(key, site);
            cached.set((key, id));
        }
        id
    }

    #[cold]
    fn find(&self, key: usize, site: Site) -> SiteId {
        *self.numbers.borrow_mut().entry(key).or_insert_with(|| {
            let mut all = self.all.borrow_mut();
            all.push(site);
            // Sites beyond the limit share the last number.
            SiteId(all.len().min(usize::from(u16::MAX)) as u16)
        })
    }

    pub(super) fn site(&self, id: SiteId) -> Option<Site> {
        self.all.borrow().get(usize::from(id.0).checked_sub(1)?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_has_the_agent_and_the_time_that_made_it_up_to_the_last_block() {
        let kind = Kind { writes: true, scope: Some(Scope::Gpu), is_async: true };
        for block in [0, 1 << 20, MAX_BLOCKS - 1] {
            let agent = Agent { op: OpId(MAX_OPS), block, number: 5127 };
            let stamp = Stamp::new(agent, u32::MAX, SiteId(9), kind).of_copy(12).of_bytes(0xf);
            assert_eq!((stamp.agent(), stamp.time(), stamp.kind()), (agent, u32::MAX, kind));
            assert!(stamp.site() == SiteId(9) && stamp.bytes() == 0xf);
        }
    }
}
