//! The form of a message: a vector that has no empty word.

use crate::prelude::*;

/// The value of a word of a slot without a message: -0 in `f32`.
pub const EMPTY: u32 = 0x8000_0000;

/// Returns a vector as peers receive it: words that are [`EMPTY`] become 0.
pub fn message<T: Element>(vector: Vec16<T>) -> Vec16<T> {
    Vec16::from_bits(vector.to_bits().map(message_word))
}

/// Returns a word as peers receive it.
pub fn message_word(word: u32) -> u32 {
    if word == EMPTY { 0 } else { word }
}

/// Returns whether a slot with these words holds a message.
pub(super) fn is_message<T: Element>(vector: Vec16<T>) -> bool {
    let [a, b, c, d] = vector.to_bits();
    a != EMPTY && b != EMPTY && c != EMPTY && d != EMPTY
}
