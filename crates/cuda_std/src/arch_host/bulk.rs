//! `mbarrier`, TMA and clusters in the simulator. A copy moves its data at once, unless the
//! simulator keeps it to move it before a wait returns. The steps that order copies are reported to
//! the simulator in either case.

use std::panic::Location;

use devcomm_types::{DataType, TensorMap, TensorMapDesc};
use half::{bf16, f16};

use super::copies::{copy, put};
use super::memory::{event, spin, touch};
use super::tensor::SharedAddress;
use super::tensor::swizzled;
use super::{Access, Engine, Event, Order, Scope, Space};

/// The state of a barrier, stored in its 64-bit word.
#[derive(Clone, Copy)]
struct State {
    /// The number of arrivals per phase.
    arrivals: u32,
    /// Pending arrivals of the current phase.
    pending: u32,
    /// Pending bytes of the current phase; negative while more have arrived than are expected yet.
    bytes: i32,
    /// The parity of the current phase.
    parity: bool,
}

/// A field of 20 bits of the word, whose bits 0 to 19 are `arrivals`, 20 to 39 `pending`, 40
/// `parity`, and 41 to 63 `bytes`.
const FIELD: u32 = (1 << 20) - 1;

impl State {
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

    /// Changes the pending arrivals and bytes of a barrier, and completes the phase if nothing is
    /// pending. Reports the event that `event_of` makes of the barrier's address and of whether the
    /// phase ends.
    #[track_caller]
    fn change(
        word: SharedAddress,
        event_of: impl FnOnce(usize, bool) -> Event,
        (arrivals, bytes): (u32, i32),
    ) {
        let word = touch(word.cast::<u64>(), Access::BarrierChange);
        // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`. Simulated threads run
        // one at a time.
        let mut phase = Self::of(unsafe { word.read() });
        assert!(
            phase.pending >= arrivals,
            "more arrivals at a barrier than it was initialized for"
        );
        phase.pending -= arrivals;
        phase.bytes += bytes;
        let ends = phase.pending == 0 && phase.bytes == 0;
        if ends {
            phase.pending = phase.arrivals;
            phase.parity = !phase.parity;
        }
        // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`. Simulated threads run
        // one at a time.
        unsafe { word.write(phase.to_word()) }
        event(event_of(word.addr(), ends));
    }

    /// Arrives at the barrier, and adds to the bytes that its phase expects.
    #[track_caller]
    fn arrive_at(word: SharedAddress, bytes: i32) {
        let event_of = |barrier, ends| Event::BarrierArrive { barrier, ends };
        Self::change(word, event_of, (1, bytes));
    }

    /// Counts bytes that have arrived.
    #[track_caller]
    fn receive(word: SharedAddress, bytes: i32) {
        let event_of = |barrier, ends| Event::BarrierTransaction { barrier, ends };
        Self::change(word, event_of, (0, -bytes));
    }
}

/// Returns the arrivals and bytes that the phase of an `mbarrier` with this word lacks.
#[must_use]
pub fn pending_of_mbarrier(word: u64) -> (u32, i32) {
    let State { pending, bytes, .. } = State::of(word);
    (pending, bytes)
}

#[track_caller]
pub(crate) fn mbarrier_init(word: SharedAddress, arrivals: u32) {
    assert!(
        (1..=FIELD).contains(&arrivals),
        "a barrier's number of arrivals must be 1 to 2^20 - 1"
    );
    let word = touch(word.cast::<u64>(), Access::Write);
    let phase = State { arrivals, pending: arrivals, bytes: 0, parity: false };
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    unsafe { word.write(phase.to_word()) }
    event(Event::BarrierInit(word.addr()));
}

events! {
    mbarrier_fence_init = Event::BarrierFence;
    commit_stores = Event::Commit(Engine::Bulk);
    wait_stores_read<const N: u32> =
        Event::Wait { engine: Engine::Bulk, pending: N, reads_only: true };
    wait_stores<const N: u32> = Event::Wait { engine: Engine::Bulk, pending: N, reads_only: false };
    fence_async_shared = Event::ProxyFence(Space::Shared);
    fence_async_global = Event::ProxyFence(Space::Global);
}

hooks! {
    wait_for_previous() = wait_for_previous();
    cluster_sync() = cluster_sync(false);
    cluster_sync_relaxed() = cluster_sync(true);
    set_registers(count: u32, raise: bool) = set_registers(count, raise);
}

#[track_caller]
pub(crate) fn mbarrier_arrive(word: SharedAddress) {
    State::arrive_at(word, 0);
}

#[track_caller]
pub(crate) fn mbarrier_arrive_expect_tx(word: SharedAddress, bytes: u32) {
    assert!(bytes <= FIELD, "a call must expect less than 2^20 bytes");
    State::arrive_at(word, bytes as i32);
}

/// Returns the barrier's address while its phase of this parity has not ended; `None` after that,
/// or if the simulator ends the wait at once.
#[track_caller]
fn pending(word: SharedAddress, parity: u32) -> Option<usize> {
    let (thread, context) = super::current();
    if (context.ops.skips_wait)(thread, Location::caller()) {
        return None;
    }
    let word = touch(word.cast::<u64>(), Access::BarrierTest);
    // SAFETY: the word is a barrier's, by the contract of `MBarrier::at`.
    let phase = State::of(unsafe { word.read() });
    if u32::from(phase.parity) == parity {
        return Some(word.addr());
    }
    event(Event::BarrierWaited(word.addr()));
    None
}

#[track_caller]
pub(crate) fn mbarrier_try_wait(word: SharedAddress, parity: u32) -> bool {
    let has_ended = pending(word, parity).is_none();
    if !has_ended {
        spin();
    }
    has_ended
}

#[track_caller]
pub(crate) fn mbarrier_wait(word: SharedAddress, parity: u32) {
    while let Some(barrier) = pending(word, parity) {
        let (thread, context) = super::current();
        (context.ops.wait_phase)(thread, barrier, parity, Location::caller());
    }
}

/// Returns the description of a map, which must be of the simulator.
#[track_caller]
fn description(map: &TensorMap) -> TensorMapDesc {
    let Some(description) = TensorMapDesc::of_simulated(map) else {
        panic!("this tensor map was not made for a simulated GPU: use Context::tensor_map");
    };
    description
}

/// Requires a map whose tiles have this number of rows.
#[track_caller]
pub(crate) fn check_rows(map: &TensorMap, rows: u32) {
    let found = description(map).tile_rows;
    assert!(found == rows, "the map has tiles of {found} rows, the shared tile has {rows}");
}

/// Returns the 16-byte chunks of a tile: each with its address in the tile, and in the matrix if it
/// lies there.
#[track_caller]
fn chunks(
    map: &TensorMapDesc,
    tile: *const u8,
    row: u32,
    column: u32,
) -> impl Iterator<Item = (*mut u128, Option<*mut u128>)> {
    assert!(tile.addr().is_multiple_of(1024), "a tile's address must be a multiple of 1,024");
    const CHUNKS: u32 = TensorMapDesc::ROW_BYTES / 16;
    // Elements per chunk.
    let unit = map.chunk();
    assert!(
        column.is_multiple_of(unit),
        "a simulated TMA copy begins at a multiple of 16 bytes of a row: column {column} is not a \
         multiple of {unit}"
    );
    let matrix = std::ptr::with_exposed_provenance_mut::<u128>(map.address as usize);
    let (rows, columns) = (map.rows, map.columns);
    (0..map.tile_rows).flat_map(move |r| {
        (0..CHUNKS).map(move |chunk| {
            // Rows and columns before the first one are large numbers, as of the instruction.
            let (row, column) = (row.wrapping_add(r), column.wrapping_add(unit * chunk));
            let at = (u64::from(row) * u64::from(columns) + u64::from(column)) / u64::from(unit);
            let in_matrix = row < rows && column < columns;
            let in_tile = swizzled(tile.wrapping_add((128 * r + 16 * chunk) as usize));
            let global = in_matrix.then(|| matrix.wrapping_add(at as usize));
            (in_tile.cast_mut().cast::<u128>(), global)
        })
    })
}

#[track_caller]
pub(crate) unsafe fn load_tile(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
) {
    let map = description(map);
    let engine = Engine::Load(barrier.addr());
    event(Event::Uses(engine));
    for (target, from) in chunks(&map, to, row, column) {
        // A closure here would have a location of its own, which reports would name.
        if let Some(from) = from {
            // SAFETY: the chunks lie in the tile and in the matrix, valid by the caller's contract.
            unsafe { copy(engine, target, from, Access::Write, None) }
        } else {
            // SAFETY: the chunk lies in the tile.
            unsafe { put(engine, target, 0) }
        }
    }
    // All bytes count now, also those of pieces that the simulator keeps: it moves these when a
    // thread has waited for the barrier, before that thread goes on.
    State::receive(barrier, (map.tile_rows * 128) as i32);
    event(Event::Uses(Engine::Thread));
}

// The simulator has no L2 cache from which the tile could be evicted first.
pub(crate) use load_tile as load_tile_once;

#[track_caller]
pub(crate) unsafe fn load_tile_multicast(
    to: SharedAddress,
    map: &TensorMap,
    row: u32,
    column: u32,
    barrier: SharedAddress,
    blocks: u16,
) {
    for block in (0..16).filter(|block| blocks >> block & 1 == 1) {
        let (to, barrier) = (map_shared(to, block), map_shared(barrier, block));
        // SAFETY: the caller's contract: each block has the tile and the barrier.
        unsafe { load_tile(to, map, row, column, barrier) }
    }
}

#[track_caller]
pub(crate) unsafe fn store_tile(map: &TensorMap, row: u32, column: u32, from: SharedAddress) {
    event(Event::Uses(Engine::Bulk));
    for (source, to) in chunks(&description(map), from, row, column) {
        let Some(to) = to else { continue };
        // SAFETY: the chunks lie in the tile and in the matrix, valid by the caller's contract.
        unsafe { copy(Engine::Bulk, to, source, Access::Write, None) }
    }
    event(Event::Uses(Engine::Thread));
}

#[track_caller]
pub(crate) unsafe fn store_bulk(to: *mut u8, from: SharedAddress, bytes: u32) {
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { copy_bulk(to, from, bytes, Access::Write) }
}

#[track_caller]
pub(crate) unsafe fn store_words(to: *mut u32, from: SharedAddress, bytes: u32) {
    // The receiver polls each word by relaxed loads.
    let kind = Access::AtomicWrite(Order::Relaxed, Scope::Sys);
    // SAFETY: the caller keeps source and target valid and aligned until the copy has ended.
    unsafe { copy_bulk(to.cast(), from, bytes, kind) }
}

/// Makes a bulk copy, whose stores are of this kind.
///
/// # Safety
///
/// `from` and `to` are valid for the bytes until the copy has ended.
#[track_caller]
unsafe fn copy_bulk(to: *mut u8, from: SharedAddress, bytes: u32, kind: Access) {
    let ends = [to.addr(), from.addr(), bytes as usize];
    assert!(ends.iter().all(|end| end.is_multiple_of(16)), "a bulk copy is of multiples of 16");
    event(Event::Uses(Engine::Bulk));
    for chunk in 0..bytes as usize / 16 {
        let source = from.cast::<u128>().wrapping_add(chunk);
        let to = to.cast::<u128>().wrapping_add(chunk);
        // SAFETY: the chunks are valid by the caller's contract.
        unsafe { copy(Engine::Bulk, to, source, kind, None) }
    }
    event(Event::Uses(Engine::Thread));
}

#[track_caller]
pub(crate) unsafe fn reduce_add_tile(map: &TensorMap, row: u32, column: u32, from: SharedAddress) {
    let map = description(map);
    let (sum, kind) = (Some(adder(map.data_type)), Access::AtomicRmw(Order::Relaxed, Scope::Gpu));
    event(Event::Uses(Engine::Bulk));
    for (source, to) in chunks(&map, from, row, column) {
        let Some(to) = to else { continue };
        // SAFETY: the chunks lie in the tile and in the matrix, valid by the caller's contract.
        unsafe { copy(Engine::Bulk, to, source, kind, sum) }
    }
    event(Event::Uses(Engine::Thread));
}

/// Returns the function that adds two chunks, number by number.
#[track_caller]
fn adder(data_type: DataType) -> fn(u128, u128) -> u128 {
    /// Adds two chunks of numbers of `bits` bits. `sum` takes and returns the bits of a number.
    fn add_chunks(a: u128, b: u128, bits: u32, sum: fn(u32, u32) -> u32) -> u128 {
        let number = |chunk: u128, at| (chunk >> at) as u32 & (u32::MAX >> (32 - bits));
        let numbers = (0..128).step_by(bits as usize);
        numbers.map(|at| u128::from(sum(number(a, at), number(b, at))) << at).sum()
    }
    match data_type {
        DataType::Float16 => |a, b| {
            add_chunks(a, b, 16, |a, b| {
                (f16::from_bits(a as u16) + f16::from_bits(b as u16)).to_bits().into()
            })
        },
        DataType::Bfloat16 => |a, b| {
            add_chunks(a, b, 16, |a, b| {
                (bf16::from_bits(a as u16) + bf16::from_bits(b as u16)).to_bits().into()
            })
        },
        DataType::Float32 => {
            |a, b| add_chunks(a, b, 32, |a, b| (f32::from_bits(a) + f32::from_bits(b)).to_bits())
        }
        other => panic!("the simulator adds tiles of f16, bf16 and f32, not of {other:?}"),
    }
}

#[track_caller]
pub(crate) fn mbarrier_arrive_cluster(word: SharedAddress, block: u32) {
    State::arrive_at(map_shared(word, block), 0);
}

/// Returns the address in the shared memory of the cluster's block of this rank.
#[track_caller]
fn map_shared<T>(address: *mut T, rank: u32) -> *mut T {
    let (thread, context) = super::current();
    let at = Location::caller();
    let mapped = (context.ops.map_shared)(thread, address.expose_provenance(), rank, at);
    std::ptr::with_exposed_provenance_mut(mapped)
}

#[track_caller]
pub(crate) unsafe fn send_shared(
    to: SharedAddress,
    block: u32,
    value: [u32; 4],
    barrier: SharedAddress,
) {
    let (to, barrier) = (map_shared(to, block), map_shared(barrier, block));
    let engine = Engine::Send(barrier.addr());
    event(Event::Uses(engine));
    let value = value.iter().rev().fold(0, |all, word| all << 32 | u128::from(*word));
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe { put(engine, to.cast::<u128>(), value) };
    State::receive(barrier, 16);
    event(Event::Uses(Engine::Thread));
}

#[track_caller]
pub(crate) unsafe fn store_cluster(to: *mut [f32; 4], block: u32, value: [f32; 4]) {
    let to = touch(map_shared(to, block).cast::<u128>(), Access::Write);
    // SAFETY: the caller passes an aligned address in the shared memory of a running block.
    unsafe { to.cast::<[f32; 4]>().write(value) }
}

pub(crate) fn launch_next() {
    let (thread, context) = super::current();
    (context.ops.launch_next)(thread);
}

pub(crate) fn cluster_size() -> u32 {
    let (thread, context) = super::current();
    (context.ops.cluster_size)(thread)
}

pub(crate) fn cluster_rank() -> u32 {
    let (thread, context) = super::current();
    (context.ops.cluster_rank)(thread)
}

#[track_caller]
pub(crate) fn raise_registers<const N: u32>() {
    check_registers(N);
    set_registers(N, true);
}

#[track_caller]
pub(crate) fn lower_registers<const N: u32>() {
    check_registers(N);
    set_registers(N, false);
}

#[track_caller]
fn check_registers(count: u32) {
    assert!(
        (24..=256).contains(&count) && count.is_multiple_of(8),
        "setmaxnreg takes a multiple of 8 from 24 to 256, not {count}"
    );
}

pub(crate) fn prefetch_map(_map: &TensorMap) {
    super::current();
}

#[cfg(test)]
mod tests;
