//! The words (of 4 or 8 bytes) that transfers write after their copies: values that the kernel sent
//! without a source in memory, and signals.
//!
//! One call of the driver enqueues the words of a group of transfers: those that NCCL has taken
//! from its queues in one pass, and while the stream is busy, those of later passes. Each call
//! costs the thread and the stream microseconds, and of several writes to one signal only the last
//! is needed. A signal is written after all copies of its group, even those of later transfers,
//! which may begin at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Address, MemOp};
use crate::error::Result;
use crate::stream::{STAGED, TrackedStream};

/// The number of words at which a group is full. A transfer adds at most two, so a call has up to
/// 65 words, 33 barriers and a completion; the driver accepts fewer than 256 operations.
const MAX_WORDS: usize = 64;
/// The least number of signals close together that one copy writes, instead of one write each: the
/// stream takes 0.9 us for each word, and about 10 us for a copy.
const MIN_COPIED: usize = 8;

/// The values that the words of a region have, as only the plugin writes them, and the index of a
/// word: so the host knows a sum without a read of the device.
pub(crate) type Shadow = (Arc<[AtomicU64]>, usize);

/// The words of a group, in order.
#[derive(Default)]
pub(crate) struct Group {
    words: Vec<Word>,
    /// The last transfer that is complete when these words are written.
    last: Option<u64>,
}

/// The change of a word.
#[derive(Clone)]
struct Word {
    at: Address,
    value: u64,
    change: Change,
    /// The plugin's copies of the signals' values, and this signal's index, if only the plugin
    /// writes the signal.
    shadow: Option<Shadow>,
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    Write32,
    Write64,
    Add64,
}

impl Group {
    pub(crate) fn write_32(&mut self, at: Address, value: u32) {
        self.words.push(Word { at, value: value.into(), change: Change::Write32, shadow: None });
    }

    pub(crate) fn write_64(&mut self, at: Address, value: u64, shadow: Option<Shadow>) {
        self.take(at, Change::Write64);
        self.words.push(Word { at, value, change: Change::Write64, shadow });
    }

    pub(crate) fn add_64(&mut self, at: Address, value: u64) {
        let before = self.take(at, Change::Add64).unwrap_or(0);
        let value = before.wrapping_add(value);
        self.words.push(Word { at, value, change: Change::Add64, shadow: None });
    }

    /// Removes the last change of a word of 8 bytes, if it is of this kind, and returns its value.
    /// The caller replaces it by a new change, which comes after all words in the group.
    fn take(&mut self, at: Address, change: Change) -> Option<u64> {
        let index = self.words.iter().rposition(|word| word.overlaps(at, 8))?;
        let is_same = self.words[index].at == at && self.words[index].change == change;
        is_same.then(|| self.words.remove(index).value)
    }

    /// Returns whether a word lies in this range: a copy to the range must come after the word.
    pub(crate) fn writes_to(&self, at: Address, bytes: usize) -> bool {
        self.words.iter().any(|word| word.overlaps(at, bytes as Address))
    }

    /// Records that the group has all words of transfer `sequence`. Returns whether it has room for
    /// those of another one.
    pub(crate) fn end_transfer(&mut self, sequence: u64) -> bool {
        self.last = Some(sequence);
        self.words.len() < MAX_WORDS
    }

    /// Enqueues the words on `stream`, whose context is current, and then a write that marks the
    /// group's transfers complete. Returns the last of them, and empties the group.
    pub(crate) fn enqueue(&mut self, stream: &TrackedStream) -> Result<Option<u64>> {
        if self.copy_signals(stream)? {
            self.words.clear();
        }
        let mut operations = self.operations();
        let last = self.last.take();
        operations.extend(last.map(|last| stream.done_op(last)));
        if !operations.is_empty() {
            stream.enqueue(&mut operations)?;
        }
        Ok(last)
    }

    /// Returns the operations of all words, in order, and removes the words.
    fn operations(&mut self) -> Vec<MemOp> {
        let mut operations = Vec::with_capacity(2 * self.words.len() + 1);
        let mut is_ordered = false;
        for word in self.words.drain(..) {
            // An addition is not ordered after copies and writes by itself.
            let is_addition = word.change == Change::Add64;
            if is_addition && !is_ordered {
                operations.push(MemOp::barrier());
            }
            is_ordered = is_addition;
            operations.push(word.operation());
        }
        operations
    }

    /// Writes all words by one copy of the range that contains them. It does so if they are many
    /// signals of one region that only the plugin writes, so that it knows the words between them,
    /// and if the range fits in a slot of pinned memory. Returns whether it did.
    fn copy_signals(&self, stream: &TrackedStream) -> Result<bool> {
        let signals = self.words.iter().map(|word| Some((word.at, word.shadow.as_ref()?)));
        let signals: Vec<_> = signals.collect::<Option<_>>().unwrap_or_default();
        let first = signals.iter().min_by_key(|(at, _)| *at);
        let Some(&(at, (values, first))) = first.filter(|_| signals.len() >= MIN_COPIED) else {
            return Ok(false);
        };
        let is_one_region = signals.iter().all(|(_, (other, _))| Arc::ptr_eq(other, values));
        let last = signals.iter().map(|(_, (_, index))| *index).max().unwrap_or(*first);
        if !is_one_region || last - first >= STAGED {
            return Ok(false);
        }
        // The caller's lock on the inbound queue keeps the values from changing meanwhile.
        let words = values[*first..=last].iter().map(|value| value.load(Ordering::Relaxed));
        stream.copy_words(at, words).map(|()| true)
    }
}

impl Word {
    fn overlaps(&self, at: Address, bytes: Address) -> bool {
        let own = if self.change == Change::Write32 { 4 } else { 8 };
        self.at < at + bytes && at < self.at + own
    }

    fn operation(self) -> MemOp {
        match self.change {
            Change::Write32 => MemOp::write_32(self.at, self.value as u32),
            Change::Write64 => MemOp::write_64(self.at, self.value),
            Change::Add64 => MemOp::add_64(self.at, self.value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(group: &Group) -> Vec<(Address, u64)> {
        group.words.iter().map(|word| (word.at, word.value)).collect()
    }

    #[test]
    fn the_last_of_several_changes_to_a_word_stays_and_includes_the_others() {
        let mut group = Group::default();
        group.write_64(8, 1, None);
        group.write_64(16, 1, None);
        group.write_64(8, 2, None);
        assert_eq!(words(&group), [(16, 1), (8, 2)]);
        let mut group = Group::default();
        group.add_64(8, 5);
        group.write_32(64, 7);
        group.add_64(8, 6);
        assert_eq!(words(&group), [(64, 7), (8, 11)], "a signal comes after what is before it");
    }

    #[test]
    fn an_addition_is_ordered_after_copies_and_after_values_of_its_group() {
        let mut group = Group::default();
        group.add_64(8, 1);
        group.add_64(16, 2);
        group.write_64(64, 3, None);
        group.write_32(72, 4);
        group.add_64(24, 5);
        let barrier = MemOp::barrier();
        let (first, second) = (MemOp::add_64(8, 1), MemOp::add_64(16, 2));
        let (values, third) =
            ([MemOp::write_64(64, 3), MemOp::write_32(72, 4)], MemOp::add_64(24, 5));
        let expected = [barrier, first, second, values[0], values[1], barrier, third];
        assert_eq!(group.operations(), expected);
    }

    #[test]
    fn changes_of_other_kinds_to_a_word_keep_their_order() {
        let mut group = Group::default();
        group.add_64(8, 5);
        group.write_64(8, 1, None);
        group.add_64(8, 2);
        group.write_32(12, 3);
        group.add_64(8, 4);
        assert_eq!(words(&group), [(8, 5), (8, 1), (8, 2), (12, 3), (8, 4)]);
        assert!(group.writes_to(0, 9) && group.writes_to(15, 1));
        assert!(!group.writes_to(0, 8) && !group.writes_to(16, 100));
    }
}
