//! Shared memory of a block: initially poisoned, with a canary after every array to detect
//! overruns.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

use crate::base::error::Site;
use crate::base::layout::POISON;

const POISON_WORD: u128 = {
    let p = POISON as u128;
    p | p << 32 | p << 64 | p << 96
};

/// Length of the canary after an array, in 16-byte words.
const CANARY: usize = 8;

/// Arrays start 16 bytes after a multiple of this: an offset has the same alignment in every block,
/// and a kernel that relies on more than 16 bytes fails unless it aligns the address itself.
const ALIGN: usize = 1024;

/// Maximum static shared memory of a block in bytes. Its sum with the dynamic one is not checked: a
/// host subtracts a function's static memory from the limit, and here that is 0 before the kernel
/// runs.
pub(crate) const MAX_STATIC: usize = 48 << 10;

/// Maximum shared memory of a block in bytes, static and dynamic, on Hopper.
pub(crate) const MAX_SHARED: usize = 227 << 10;

/// One array and its canary.
struct SharedArray {
    /// Address of the static that identifies the array; 0 for the dynamic one.
    key: usize,
    bytes: usize,
    /// The line in the kernel; `None` for the dynamic one.
    at: Option<Site>,
    /// The words, in cells, since kernels write them through pointers, which moving the `Rc` (other
    /// than a `Box`) leaves valid.
    words: Rc<[Cell<u128>]>,
    /// Index of the first word.
    first: usize,
}

/// A location in shared memory, in any block of a grid.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    key: usize,
    /// Length of the array.
    pub(crate) bytes: usize,
    at: Option<Site>,
    offset: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} of {}", self.offset, name(self.bytes, self.at))
    }
}

/// Returns the name of an array in reports.
fn name(bytes: usize, at: Option<Site>) -> String {
    match at {
        Some(at) => format!("the shared array at {at} ({bytes} bytes)"),
        None => format!("the dynamic shared memory of {bytes} bytes"),
    }
}

impl SharedArray {
    fn new(key: usize, bytes: usize, at: Option<Site>) -> Self {
        let len = ALIGN / 16 + bytes.div_ceil(16) + CANARY;
        let words: Rc<[_]> = vec![Cell::new(POISON_WORD); len].into();
        let first = 16_usize.wrapping_sub(words.as_ptr().addr()) % ALIGN / 16;
        Self { key, bytes, at, words, first }
    }

    fn start(&self) -> *mut u8 {
        self.words[self.first..].as_ptr().cast_mut().cast()
    }

    /// Returns whether the canary is unchanged.
    fn is_intact(&self) -> bool {
        let used = self.first + self.bytes / 16;
        let (partial, canary) = self.words[used..].split_at(1);
        let used_bits = (self.bytes % 16) * 8;
        partial[0].get() >> used_bits == POISON_WORD >> used_bits
            && canary.iter().all(|word| word.get() == POISON_WORD)
    }

    fn name(&self) -> String {
        name(self.bytes, self.at)
    }

    /// Returns the distance in bytes of an address from the array, and a text that says where it
    /// is. The distance is 0 for an access that begins in the array and exceeds it.
    fn distance(&self, address: usize) -> (usize, String) {
        let start = self.start().addr();
        match address.checked_sub(start) {
            None => (start - address, format!("{} bytes before {}", start - address, self.name())),
            Some(offset) if offset < self.bytes => {
                (0, format!("in {}, whose end the access exceeds", self.name()))
            }
            Some(offset) => {
                let after = offset - self.bytes;
                (after, format!("{after} bytes after the end of {}", self.name()))
            }
        }
    }

    fn contains(&self, address: usize, bytes: usize) -> bool {
        address
            .checked_sub(self.start().addr())
            .is_some_and(|offset| offset <= self.bytes && bytes <= self.bytes - offset)
    }
}

/// All shared memory of a block.
pub(crate) struct SharedMemory {
    dynamic: SharedArray,
    statics: Vec<SharedArray>,
}

impl SharedMemory {
    /// Returns poisoned memory, with `bytes` of dynamic shared memory.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { dynamic: SharedArray::new(0, bytes, None), statics: Vec::new() }
    }

    /// Returns the address and length of the dynamic memory.
    pub(crate) fn dynamic(&self) -> (*mut u8, usize) {
        (self.dynamic.start(), self.dynamic.bytes)
    }

    /// Returns the block's copy of the static at `key`; `None` if it does not fit.
    pub(crate) fn of_static(
        &mut self,
        key: usize,
        bytes: usize,
        at: Option<Site>,
    ) -> Option<*mut u8> {
        let found = self.statics.iter().position(|a| a.key == key && a.bytes == bytes);
        let index = match found {
            Some(index) => index,
            None => {
                let used: usize = self.statics.iter().map(|a| a.bytes.next_multiple_of(16)).sum();
                if used + bytes > MAX_STATIC {
                    return None;
                }
                self.statics.push(SharedArray::new(key, bytes, at));
                self.statics.len() - 1
            }
        };
        Some(self.statics[index].start())
    }

    fn arrays(&self) -> impl Iterator<Item = &SharedArray> {
        self.statics.iter().chain([&self.dynamic])
    }

    /// Returns the array with these bytes.
    fn array(&self, address: usize, bytes: usize) -> Option<&SharedArray> {
        self.arrays().find(|array| array.contains(address, bytes))
    }

    /// Returns start and length of each array.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (usize, usize)> {
        self.arrays().map(|array| (array.start().addr(), array.bytes))
    }

    /// Returns whether the bytes lie within one array.
    pub(crate) fn contains(&self, address: usize, bytes: usize) -> bool {
        self.array(address, bytes).is_some()
    }

    /// Returns the location of an address.
    pub(crate) fn place(&self, address: usize) -> Option<Place> {
        let array = self.array(address, 1)?;
        let offset = address - array.start().addr();
        Some(Place { key: array.key, bytes: array.bytes, at: array.at, offset })
    }

    /// Returns the address in this block of a location that was found in another block; `None` if
    /// this block has no room for its static.
    pub(crate) fn address_of(&mut self, Place { key, bytes, at, offset }: Place) -> Option<usize> {
        let start = if key == 0 { self.dynamic().0 } else { self.of_static(key, bytes, at)? };
        Some(start.expose_provenance() + offset)
    }

    /// Returns the distance and the location of an address that is in no array, relative to the
    /// nearest array, unless the distance exceeds the length of a block's shared memory.
    pub(crate) fn nearest(&self, address: usize) -> Option<(usize, String)> {
        let nearest = self.arrays().map(|array| array.distance(address)).min_by_key(|(at, _)| *at);
        nearest.filter(|(distance, _)| *distance <= MAX_SHARED)
    }

    /// Returns the name and the length in bytes of an array whose end was overrun, if any.
    pub(crate) fn overrun(&self) -> Option<(String, usize)> {
        let overrun = self.arrays().find(|array| !array.is_intact());
        overrun.map(|array| (array.name(), array.bytes))
    }
}
