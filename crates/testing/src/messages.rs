//! Message data: every element is a function of a seed, its sender and its index.

use devcomm::Element;
use half::{bf16, f16};

/// An element type of messages.
pub trait Datum: Element {
    /// Returns an element made of these random bits, but never one of all ones: these mark elements
    /// that were not written.
    fn of(random: u64) -> Self;
    /// Returns its bits.
    fn bits(self) -> u64;
    /// The bits of an unwritten element, after a fill with 0xff.
    const UNTOUCHED: u64 = u64::MAX >> (64 - 8 * size_of::<Self>());
}

macro_rules! data {
    ($($type:ty, $random:ident => $of:expr, $x:ident => $bits:expr;)*) => { $(
        impl Datum for $type {
            fn of($random: u64) -> Self {
                $of
            }
            fn bits(self) -> u64 {
                let $x = self;
                $bits.into()
            }
        }
    )* };
}

data! {
    u8, random => (random % 255) as u8, x => x;
    u64, random => random % u64::MAX, x => x;
    f32, random => f32::from_bits((random % u64::from(u32::MAX)) as u32), x => x.to_bits();
    f16, random => f16::from_bits((random % 0xffff) as u16), x => x.to_bits();
    bf16, random => bf16::from_bits((random % 0xffff) as u16), x => x.to_bits();
}

/// Returns the element `i` of rank `from`'s message.
pub fn datum<T: Datum>(seed: u64, from: usize, i: usize) -> T {
    T::of(fastrand::Rng::with_seed(seed ^ ((from as u64) << 48) ^ i as u64).u64(..))
}

/// Returns the rank `from`'s send buffer of an all-to-all with `count` elements per pair, in peer
/// order.
pub fn sent<T: Datum>(seed: u64, from: usize, n_ranks: usize, count: usize) -> Vec<T> {
    (0..n_ranks * count).map(|i| datum(seed, from, i)).collect()
}

/// Returns how many elements of rank `to`'s receive buffer are wrong, including those after the
/// messages, which must stay unwritten after a fill with 0xff.
pub fn count_wrong<T: Datum>(
    seed: u64,
    to: usize,
    n_ranks: usize,
    count: usize,
    got: &[T],
) -> usize {
    let expected = |at: usize| match at.checked_div(count) {
        Some(from) if from < n_ranks => datum::<T>(seed, from, to * count + at % count).bits(),
        _ => T::UNTOUCHED,
    };
    got.iter().enumerate().filter(|(at, got)| got.bits() != expected(*at)).count()
}
