//! Shared memory of a block: poisoned at its start, and with a margin behind every array that shows
//! when it was overrun.

use std::cell::Cell;
use std::rc::Rc;

use crate::memory::POISON;

const WORD: u128 = {
    let p = POISON as u128;
    p | p << 32 | p << 64 | p << 96
};

/// Words behind an array.
const MARGIN: usize = 8;

/// Static shared memory that a block can have in bytes.
pub(crate) const MAX_STATIC: usize = 48 << 10;

/// Shared memory of a block in bytes, static and dynamic, on Hopper.
pub(crate) const MAX_SHARED: usize = 227 << 10;

/// One array and its margin.
struct Array {
    /// Address of the static that stands for it.
    key: usize,
    bytes: usize,
    /// In cells, because kernels write them through pointers.
    words: Rc<[Cell<u128>]>,
}

impl Array {
    fn new(key: usize, bytes: usize) -> Self {
        Self { key, bytes, words: vec![Cell::new(WORD); bytes.div_ceil(16) + MARGIN].into() }
    }

    fn start(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    /// Whether the bytes behind the array are what they were.
    fn intact(&self) -> bool {
        let used = self.bytes / 16;
        let (partial, margin) = self.words[used..].split_at(1);
        let kept = (self.bytes % 16) * 8;
        partial[0].get() >> kept == WORD >> kept && margin.iter().all(|word| word.get() == WORD)
    }

    fn contains(&self, address: usize, bytes: usize) -> bool {
        address
            .checked_sub(self.start().addr())
            .is_some_and(|offset| offset <= self.bytes && bytes <= self.bytes - offset)
    }
}

/// What a block has.
#[derive(Default)]
pub(crate) struct SharedMemory {
    dynamic: Option<Array>,
    statics: Vec<Array>,
}

impl SharedMemory {
    /// Fresh memory, with `bytes` of dynamic.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { dynamic: Some(Array::new(0, bytes)), statics: Vec::new() }
    }

    /// Address and length of the dynamic memory.
    pub(crate) fn dynamic(&self) -> (*mut u8, usize) {
        self.dynamic.as_ref().map_or((std::ptr::null_mut(), 0), |a| (a.start(), a.bytes))
    }

    /// The block's copy of the static at `key`, or nothing if there is no room for it.
    pub(crate) fn of_static(&mut self, key: usize, bytes: usize) -> Option<*mut u8> {
        let found = self.statics.iter().position(|a| a.key == key && a.bytes == bytes);
        let index = match found {
            Some(index) => index,
            None => {
                let used: usize = self.statics.iter().map(|a| a.bytes.next_multiple_of(16)).sum();
                if used + bytes > MAX_STATIC {
                    return None;
                }
                self.statics.push(Array::new(key, bytes));
                self.statics.len() - 1
            }
        };
        Some(self.statics[index].start())
    }

    /// Whether the bytes lie in one array.
    pub(crate) fn contains(&self, address: usize, bytes: usize) -> bool {
        self.statics.iter().chain(&self.dynamic).any(|array| array.contains(address, bytes))
    }

    /// The first array that was written beyond its end: what it is and its length in bytes.
    pub(crate) fn overrun(&self) -> Option<(&'static str, usize)> {
        let broken = |array: &&Array| !array.intact();
        let of_static = self.statics.iter().find(broken).map(|a| ("static", a.bytes));
        of_static.or_else(|| self.dynamic.iter().find(broken).map(|a| ("dynamic", a.bytes)))
    }
}
