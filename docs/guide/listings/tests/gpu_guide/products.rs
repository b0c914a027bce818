//! The steps from a product to a product fused with an all-reduce.

// ANCHOR: factors
use std::fmt::Debug;

use devcomm::device::TileExchange;
use devcomm::{Buffer, DevCommRequirements, Element, Error, Rank, Stream, SymmetricBuffer};
use half::bf16;
use kernels::exchange::{ELEMENTS, product_exchange, product_exchange_relu};
use kernels::products::{THREADS, TILE, product, product_all_reduce, product_then_reduce};
use norm::KERNELS;

/// Three tiles of C, and terms that do not fill the last stage.
const M: usize = TILE as usize;
const N: usize = 3 * M;
const K: usize = 40;

/// Element `i` of a rank's A (matrix 0) or B (1): a whole number from -8 to 8, so that sums are
/// exact.
fn element(rank: usize, matrix: usize, i: usize) -> f32 {
    let mixed = (10_000_019 * rank + 1_000_003 * matrix + i) as u32;
    (mixed.wrapping_mul(2_654_435_761) >> 24) as f32 % 17.0 - 8.0
}

/// A and B in this rank's memory.
fn factors(rank: &Rank) -> Result<[SymmetricBuffer<bf16>; 2], Error> {
    let matrix = |matrix, rows| {
        let elements = (0..rows * K).map(|i| bf16::from_f32(element(rank.rank(), matrix, i)));
        let elements: Vec<bf16> = elements.collect();
        let buffer = rank.communicator()?.mem_alloc(elements.len())?;
        buffer.copy_from_host(&elements)?;
        Ok::<_, Error>(buffer)
    };
    Ok([matrix(0, M)?, matrix(1, N)?])
}

/// An element of a rank's product.
fn part_of(rank: usize, row: usize, column: usize) -> f32 {
    (0..K).map(|i| element(rank, 0, row * K + i) * element(rank, 1, column * K + i)).sum()
}

/// Checks that each element of C is what `right` says of its row and column.
fn check<T: Element + Default + PartialEq + Debug>(
    c: &impl Buffer<Element = T>,
    stream: &Stream,
    right: impl Fn(usize, usize) -> T,
) -> Result<(), Error> {
    let mut found = vec![T::default(); M * N];
    stream.copy_to_host(c, &mut found)?;
    for (i, found) in found.into_iter().enumerate() {
        assert_eq!(found, right(i / N, i % N), "row {}, column {}", i / N, i % N);
    }
    Ok(())
}
// ANCHOR_END: factors

// ANCHOR: steps
#[devcomm::test(ranks = 2)]
fn each_step_computes_its_product(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    comm.require_single_lsa_team()?;
    let [a, b] = factors(rank)?;
    let (count, tiles, ranks) = (M * N, 3, rank.n_ranks());
    let [m, n, k] = [M as u32, N as u32, K as u32];
    let sum = |row, column| (0..ranks).map(|rank| part_of(rank, row, column)).sum::<f32>();
    let (part, c) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;

    let own = comm.mem_alloc::<f32>(count)?;
    // SAFETY: the kernels' contracts; each launch has ended before the next one.
    unsafe { product::args(&a, &b, &own, m, n, k).grid(tiles).block(THREADS).launch(&stream)? };
    check(&own, &stream, |row, column| part_of(rank.rank(), row, column))?;

    let launch = product_then_reduce::args(&dev, &a, &b, &part, &c, m, n, k);
    // SAFETY: as above.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check(&c, &stream, sum)?;

    let slots = ranks * (tiles as usize).div_ceil(ranks);
    let inbox = comm.window::<f32>(slots * (TILE * TILE) as usize)?;
    let flags = comm.window::<u32>(slots)?;
    let epoch = comm.mem_alloc::<u32>(2)?;
    flags.fill_bytes(0)?;
    epoch.fill_bytes(0)?;
    rank.barrier()?;
    for _ in 0..2 {
        stream.fill(&c, f32::NAN)?;
        let launch = product_all_reduce::args(&dev, &a, &b, &inbox, &flags, &epoch, &c, m, n, k);
        // SAFETY: as above.
        unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
        check(&c, &stream, sum)?;
    }
    Ok(())
}
// ANCHOR_END: steps

// ANCHOR: exchange
#[devcomm::test(ranks = 3)]
fn tiles_that_are_pushed_are_added_in_all_ranks(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream, ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    comm.require_single_lsa_team()?;
    let [a, b] = factors(rank)?;
    let [m, n, k] = [M as u32, N as u32, K as u32];
    let rounded = |rank, row, column| bf16::from_f32(part_of(rank, row, column)).to_f32();
    let sum = |row, column| (0..ranks).map(|rank| rounded(rank, row, column)).sum::<f32>();
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    let parts = 3 * ranks;
    let (inbox, flags) = (comm.window::<bf16>(2 * parts * ELEMENTS)?, comm.window::<u32>(parts)?);
    let state = comm.mem_alloc::<u32>(TileExchange::<bf16>::STATE)?;
    let (bias, c) = (comm.mem_alloc::<f32>(N)?, comm.mem_alloc::<bf16>(M * N)?);
    flags.fill_bytes(0)?;
    state.fill_bytes(0)?;
    stream.fill(&bias, -1.5)?;
    rank.barrier()?;
    // The banks of the inbox take turns.
    for _ in 0..3 {
        stream.fill(&c, bf16::NAN)?;
        let launch = product_exchange::args(&dev, &a, &b, &inbox, &flags, &state, &c, m, n, k);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
        check(&c, &stream, |row, column| bf16::from_f32(sum(row, column)))?;
    }
    let launch =
        product_exchange_relu::args(&dev, &a, &b, &inbox, &flags, &state, &bias, &c, m, n, k);
    // SAFETY: as above.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check(&c, &stream, |row, column| bf16::from_f32((sum(row, column) - 1.5).max(0.0)))
}
// ANCHOR_END: exchange
