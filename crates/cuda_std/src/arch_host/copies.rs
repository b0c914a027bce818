//! Asynchronous copies, piece by piece.

use super::memory::touch;
use super::{Access, Engine};

/// A piece of an asynchronous copy: up to 16 bytes, which are read and written as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The address of its target.
    pub to: usize,
    /// The data that the copy writes there.
    pub from: Source,
    /// The length in bytes, at most 16.
    pub bytes: usize,
    /// The function of the target's and the source's bytes whose result is written; `None`: the
    /// source's bytes are written.
    pub sum: Option<fn(u128, u128) -> u128>,
}

/// The data that a [`Piece`] writes.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// What is at this address when the copy reads it.
    Memory(usize),
    /// These bytes.
    Value(u128),
}

/// Returns up to 16 bytes at an address.
///
/// # Safety
///
/// The address is valid for reads of the bytes, of which there are at most 16.
unsafe fn bytes_at(address: usize, bytes: usize) -> u128 {
    let mut value = 0_u128;
    let from = std::ptr::with_exposed_provenance::<u8>(address);
    // SAFETY: the caller passes a valid address of at most 16 bytes, which the value has.
    unsafe { from.copy_to_nonoverlapping((&raw mut value).cast(), bytes) };
    value
}

impl Piece {
    /// Reads the source.
    ///
    /// # Safety
    ///
    /// A source in memory is valid for reads.
    #[must_use]
    pub unsafe fn read(&self) -> u128 {
        match self.from {
            // SAFETY: the caller keeps the source valid until it has been read.
            Source::Memory(address) => unsafe { bytes_at(address, self.bytes) },
            Source::Value(value) => value,
        }
    }

    /// Writes the target, where `value` is what the source has.
    ///
    /// # Safety
    ///
    /// The target is valid for writes, and for reads if there is a sum.
    pub unsafe fn land(&self, value: u128) {
        // SAFETY: the caller keeps the target valid until the copy has landed.
        let value =
            self.sum.map_or(value, |sum| sum(unsafe { bytes_at(self.to, self.bytes) }, value));
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.to);
        // SAFETY: the caller keeps the target valid; a piece has at most the 16 bytes of the value.
        unsafe { to.copy_from_nonoverlapping((&raw const value).cast(), self.bytes) };
    }
}

/// Copies a `W` from an address, reported as an access of kind `kind` to the target. The simulator
/// may defer the copy until a thread waits for the engine.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes, until then.
#[track_caller]
pub(super) unsafe fn copy<W: Copy>(
    engine: Engine,
    to: *mut W,
    from: *const W,
    kind: Access,
    sum: Option<fn(u128, u128) -> u128>,
) {
    let from = touch(from, Access::Read);
    let to = touch(to, kind);
    let piece = piece(to, Source::Memory(from.expose_provenance()), sum);
    match (is_deferred(engine, piece), sum) {
        (true, _) => {}
        // SAFETY: the caller keeps source and target valid and aligned until the copy has landed.
        (false, None) => unsafe { to.write(from.read()) },
        // SAFETY: the caller keeps source and target valid and aligned until the copy has landed.
        (false, Some(_)) => unsafe { piece.land(piece.read()) },
    }
}

/// Writes the bytes of `value` in the way in which [`copy`] writes those of its source.
///
/// # Safety
///
/// `to` is valid for writes.
#[track_caller]
pub(super) unsafe fn put<W: Copy>(engine: Engine, to: *mut W, value: u128) {
    let to = touch(to, Access::Write);
    let piece = piece(to, Source::Value(value), None);
    if !is_deferred(engine, piece) {
        // SAFETY: the caller keeps the target valid until the copy has landed.
        unsafe { piece.land(value) }
    }
}

/// Returns the piece that writes a `W`, a number of up to 16 bytes.
fn piece<W>(to: *mut W, from: Source, sum: Option<fn(u128, u128) -> u128>) -> Piece {
    Piece { to: to.expose_provenance(), from, bytes: size_of::<W>(), sum }
}

hooks! {
    /// Returns whether the simulator copies the piece later.
    is_deferred(engine: Engine, piece: Piece) -> bool = keeps(engine, piece);
}
