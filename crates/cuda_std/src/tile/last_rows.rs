//! The stores of a warp's rows of a tile, while the next tile is multiplied.

use core::marker::PhantomData;

use super::{RegTile, SharedTile, Warpgroup};
use crate::convert::Float;
use crate::strided::Strided;
use crate::{tma, warp};

/// Parts that a warp stores at a time.
const PARTS_PER_STORE: u32 = 2;
/// Words of a lane in these parts: 16 rows of 256 bytes are 1,024 words, for 32 lanes.
const WORDS: usize = 32;

/// The kernel's part of the stores of [`LastRows`]: a warp's 16 rows of a tile, in *parts* of 128
/// bytes of each row. Two neighbouring parts are stored together.
pub trait StoresRows {
    /// The element type of the matrix, of 16 or 32 bits: [`SharedTile::store_words`] puts elements
    /// of 8 bits in an order of its own.
    type Element: Float;
    /// The place of a warp's rows in the matrix.
    type Place: Copy;

    /// Whether the kernel needs to learn what is [`stored`](Self::stored): in a third interlude.
    /// Then [`store`](Self::store) stores by TMA alone, and ends with a bulk group of messages,
    /// which may be empty: the report waits for all groups but the last one.
    const REPORTS: bool = false;

    /// Returns one of the warp's two parts in shared memory.
    fn part(&self, group: &Warpgroup, which: u32) -> SharedTile<Self::Element, 16>;

    /// Returns the word that is stored for a word of rounded sums.
    fn encode(&self, word: u32) -> u32 {
        word
    }

    /// Stores the two parts, which are those from the `first` on of the rows at `place`: by
    /// [`Warpgroup::store`], or in another way after a barrier of the warp. All lanes call it.
    fn store(&self, group: &Warpgroup, place: Self::Place, first: u32);

    /// Learns that the rows of `_tiles` tiles of warp `_warp` are in the matrix. One lane calls it.
    fn stored(&self, _warp: u32, _tiles: u32) {}
}

/// A warp's 16 rows of `8 * BLOCKS` sums of the tile that it has computed last.
///
/// The shared memory for stores has room for two parts, and its next use waits until TMA has read
/// it. So a warp stores its rows between the steps of its next tile, in the interludes of a
/// [`Mainloop`](super::Mainloop): the first one stores the parts that were written last, the second
/// one the parts that wait in registers, and the third one waits until all are in the matrix. Only
/// parts of 16-bit elements wait: other tiles have too few columns, or would take too many
/// registers.
#[derive(Clone, Copy, Debug)]
pub struct LastRows<T, P, const BLOCKS: usize> {
    place: P,
    /// The words of the last parts, rounded.
    pending: [u32; WORDS],
    tiles: u32,
    element: PhantomData<T>,
}

impl<T: Float, P: Copy, const BLOCKS: usize> LastRows<T, P, BLOCKS> {
    /// Parts, of 128 bytes each, of a row of `8 * BLOCKS` elements.
    const PARTS: u32 = BLOCKS as u32 * size_of::<T>() as u32 / 16;
    /// Parts that are written when the sums are complete; the others wait in registers.
    const AT_ONCE: u32 = {
        assert!(Self::PARTS.is_multiple_of(PARTS_PER_STORE), "two parts are stored together");
        let waits = size_of::<T>() == 2 && Self::PARTS > PARTS_PER_STORE;
        if waits { Self::PARTS - PARTS_PER_STORE } else { Self::PARTS }
    };

    /// Returns the rows of a warp that has computed no tile.
    #[must_use]
    pub fn none(place: P) -> Self {
        Self { place, pending: [0; WORDS], tiles: 0, element: PhantomData }
    }

    /// Returns the place of the rows that are being computed or, before the second interlude, of
    /// those that were computed last.
    #[must_use]
    pub fn place(&self) -> P {
        self.place
    }

    /// Returns the number of tiles that the warp has computed.
    #[must_use]
    pub fn tiles(&self) -> u32 {
        self.tiles
    }

    /// Runs interlude `index` of two, or of three if the kernel wants
    /// [reports](StoresRows::REPORTS). `place` returns the place of the tile that is computed now.
    pub fn interlude(
        &mut self,
        group: &Warpgroup,
        index: u32,
        kernel: &impl StoresRows<Element = T, Place = P>,
        place: impl FnOnce() -> P,
    ) {
        // The first interlude stores the parts that were written last, and the second one those
        // that wait in registers; if none wait, `first` is past the last part.
        let first = Self::AT_ONCE - PARTS_PER_STORE + index * PARTS_PER_STORE;
        if self.tiles == 0 {
            // There is no last tile.
        } else if index == 2 {
            self.report(group, kernel);
        } else if first < Self::PARTS {
            self.store(group, first, kernel);
        }
        if index == 1 {
            self.place = place();
        }
    }

    /// Rounds the sums of the tile that follows `before` other tiles, writes the first parts, and
    /// stores all but the last of these.
    pub fn round(
        &mut self,
        group: &Warpgroup,
        sums: &RegTile<f32, BLOCKS>,
        before: u32,
        kernel: &impl StoresRows<Element = T, Place = P>,
    ) {
        self.tiles = before + 1;
        for first in Strided::new(0, Self::PARTS, PARTS_PER_STORE) {
            let begin = (first / PARTS_PER_STORE) as usize * WORDS;
            let word = |i| kernel.encode(T::word(begin + i, |i| sums.blocks()[i / 4][i % 4]));
            if first < Self::AT_ONCE {
                if first > 0 {
                    kernel.store(group, self.place, first - PARTS_PER_STORE);
                }
                write(group, kernel, word);
            } else {
                for i in 0..WORDS {
                    self.pending[i] = word(i);
                }
            }
        }
    }

    /// Stores what is left after the last tile, and waits until all of it is in the matrix.
    pub fn end<O: StoresRows<Element = T, Place = P>>(&self, group: &Warpgroup, kernel: &O) {
        if self.tiles > 0 {
            self.store(group, Self::AT_ONCE - PARTS_PER_STORE, kernel);
            if Self::AT_ONCE < Self::PARTS {
                self.store(group, Self::AT_ONCE, kernel);
            }
        }
        if O::REPORTS {
            self.report(group, kernel);
        }
        tma::wait_stores::<0>();
    }

    /// Stores two parts, and before that writes them if they wait in registers.
    fn store<O: StoresRows<Place = P>>(&self, group: &Warpgroup, first: u32, kernel: &O) {
        if first == Self::AT_ONCE {
            write(group, kernel, |i| self.pending[i]);
        }
        kernel.store(group, self.place, first);
    }

    /// Waits until the rows are in the matrix, and reports that to the kernel.
    fn report(&self, group: &Warpgroup, kernel: &impl StoresRows<Element = T, Place = P>) {
        if warp::lane_id() == 0 {
            // The last group of stores may be of messages, still on their way to a peer.
            tma::wait_stores::<1>();
            kernel.stored(group.warp(), self.tiles);
        }
    }
}

/// Stores a warp's rows of a tile, all at once.
pub fn store_rows<O: StoresRows, const BLOCKS: usize>(
    group: &Warpgroup,
    sums: &RegTile<f32, BLOCKS>,
    place: O::Place,
    kernel: &O,
) {
    for first in Strided::new(0, LastRows::<O::Element, O::Place, BLOCKS>::PARTS, PARTS_PER_STORE) {
        let begin = (first / PARTS_PER_STORE) as usize * WORDS;
        write(group, kernel, |i| O::Element::word(begin + i, |i| sums.blocks()[i / 4][i % 4]));
        kernel.store(group, place, first);
    }
}

/// Writes two parts to shared memory; `word` returns this lane's words of them.
fn write(group: &Warpgroup, kernel: &impl StoresRows, word: impl Fn(usize) -> u32) {
    group.wait_until_read();
    for which in 0..PARTS_PER_STORE {
        let first = which as usize * (WORDS / PARTS_PER_STORE as usize);
        // SAFETY: the lanes of the warp call this together. The parts are the warp's, by the
        // contract of `Mainloop`: only its implementations have a `Warpgroup` to call this with.
        unsafe { kernel.part(group, which).store_words(warp::lane_id(), |i| word(first + i)) };
    }
}
