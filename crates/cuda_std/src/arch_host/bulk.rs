//! `mbarrier` and TMA. Copies complete immediately.

use devcomm_types::{TensorMap, TensorMapDesc};

use super::memory::{spin, touch};
use super::tensor::swizzled;
use super::{Access, Order, Scope};

/// The state of a barrier, stored in its 64-bit word.
#[derive(Clone, Copy)]
struct Phase {
    /// The number of arrivals per phase.
    arrivals: u32,
    /// Pending arrivals of the current phase.
    pending: u32,
    /// Pending bytes of the current phase; negative if they arrive before they are expected.
    bytes: i32,
    parity: bool,
}

const FIELD: u32 = (1 << 20) - 1;

impl Phase {
    fn of(word: u64) -> Self {
        Self {
            arrivals: word as u32 & FIELD,
            pending: (word >> 20) as u32 & FIELD,
            // 23 bits, sign-extended.
            bytes: (word >> 40) as u32 as i32 >> 1 << 9 >> 9,
            parity: word >> 40 & 1 == 1,
        }
    }

    fn to_word(self) -> u64 {
        let bytes = (self.bytes as u32 & ((1 << 23) - 1)) << 1 | u32::from(self.parity);
        u64::from(self.arrivals) | u64::from(self.pending) << 20 | u64::from(bytes) << 40
    }

    /// Changes a barrier's state, and completes the phase if nothing is pending.
    #[track_caller]
    fn change(word: *mut u64, change: impl FnOnce(&mut Self)) {
        touch(word, Access::AtomicRmw(Order::AcqRel, Scope::Cta));
        // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`. Simulated threads run
        // one at a time.
        let mut phase = Self::of(unsafe { word.read() });
        change(&mut phase);
        if phase.pending == 0 && phase.bytes == 0 {
            phase.pending = phase.arrivals;
            phase.parity = !phase.parity;
        }
        // SAFETY: as for the read.
        unsafe { word.write(phase.to_word()) }
    }

    #[track_caller]
    fn arrive(&mut self) {
        assert!(self.pending > 0, "more arrivals at a barrier than it was initialized for");
        self.pending -= 1;
    }
}

#[track_caller]
pub(crate) fn mbarrier_init(word: *mut u64, arrivals: u32) {
    assert!((1..=FIELD).contains(&arrivals), "a barrier is for 1 to 2^20 - 1 arrivals");
    touch(word, Access::Write);
    let phase = Phase { arrivals, pending: arrivals, bytes: 0, parity: false };
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    unsafe { word.write(phase.to_word()) }
}

pub(crate) fn mbarrier_fence_init() {
    super::current();
}

#[track_caller]
pub(crate) fn mbarrier_arrive(word: *mut u64) {
    Phase::change(word, Phase::arrive);
}

#[track_caller]
pub(crate) fn mbarrier_arrive_expect_tx(word: *mut u64, bytes: u32) {
    assert!(bytes <= FIELD, "a phase expects less than 2^20 bytes");
    Phase::change(word, |phase| {
        phase.bytes += bytes as i32;
        phase.arrive();
    });
}

#[track_caller]
pub(crate) fn mbarrier_try_wait(word: *mut u64, parity: u32) -> bool {
    touch(word, Access::AtomicRead(Order::Acquire, Scope::Cta));
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    let phase = Phase::of(unsafe { word.read_volatile() });
    let ended = u32::from(phase.parity) != parity;
    if !ended {
        spin();
    }
    ended
}

#[track_caller]
pub(crate) unsafe fn load_tile(
    to: *mut u8,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: *mut u64,
) {
    let Some(tiling) = TensorMapDesc::of_simulated(map) else {
        panic!("this tensor map was not made for a simulated GPU: use Context::tensor_map");
    };
    assert!(to.addr().is_multiple_of(1024), "a tile's address is a multiple of 1,024");
    const PIECES: u32 = TensorMapDesc::TILE_COLUMNS / 8;
    let matrix = std::ptr::with_exposed_provenance::<u128>(tiling.address as usize);
    for (r, piece) in (0..tiling.tile_rows).flat_map(|r| (0..PIECES).map(move |piece| (r, piece))) {
        let (row, column) = (row + r, column + 8 * piece);
        let value = if row < tiling.rows && column < tiling.columns {
            let at = (u64::from(row) * u64::from(tiling.columns) + u64::from(column)) / 8;
            let from = matrix.wrapping_add(at as usize);
            touch(from, Access::Read);
            // SAFETY: the piece lies in the matrix, which is allocated by the caller's contract.
            unsafe { from.read() }
        } else {
            0
        };
        let target = swizzled(to.wrapping_add((128 * r + 16 * piece) as usize)).cast_mut();
        touch(target.cast::<u128>(), Access::Write);
        // SAFETY: the piece lies in the tile, which has room by the caller's contract.
        unsafe { target.cast::<u128>().write(value) }
    }
    let bytes = (tiling.tile_rows * 128) as i32;
    Phase::change(barrier, |phase| phase.bytes -= bytes);
}

pub(crate) fn prefetch_map(_map: &TensorMap) {
    super::current();
}

#[cfg(test)]
mod tests {
    use super::Phase;

    #[test]
    fn a_word_keeps_what_a_phase_is() {
        for bytes in [0, 1, -1, 49152, -(1 << 20)] {
            for parity in [false, true] {
                let word = Phase { arrivals: 8, pending: 3, bytes, parity }.to_word();
                let Phase { arrivals, pending, bytes: b, parity: p } = Phase::of(word);
                assert_eq!((arrivals, pending, b, p), (8, 3, bytes, parity));
            }
        }
    }
}
