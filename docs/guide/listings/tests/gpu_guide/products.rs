//! The steps from a product to a product fused with an all-reduce.

// ANCHOR: factors
use devcomm::device::{Epoch, TileExchange};
use devcomm::{Buffer, DevCommRequirements, Element, Error, Rank, Stream, SymmetricBuffer};
use half::bf16;
use kernels::exchange::{ELEMENTS, product_exchange, product_exchange_relu};
use kernels::products::{THREADS, TILE, product, product_all_reduce, product_then_reduce};
use norm::KERNELS;

/// Sizes with three tiles of C, and terms that do not fill the last stage.
const M: usize = TILE as usize;
const N: usize = 3 * M;
const K: usize = 40;

/// Returns a rank's A (matrix 0) or B (1): whole numbers from -8 to 8, so that sums are exact.
fn elements(rank: usize, matrix: usize, rows: usize) -> Vec<f32> {
    let first = 10_000_019 * rank + 1_000_003 * matrix;
    let mixed = (first..).map(|i| (i as u32).wrapping_mul(2_654_435_761) >> 24);
    mixed.map(|bits| bits as f32 % 17.0 - 8.0).take(rows * K).collect()
}

/// Returns A and B in this rank's memory.
fn factors(rank: &Rank) -> Result<[SymmetricBuffer<bf16>; 2], Error> {
    let buffer = |matrix, rows| {
        let elements = elements(rank.rank(), matrix, rows);
        let elements: Vec<bf16> = elements.into_iter().map(bf16::from_f32).collect();
        let buffer = rank.communicator()?.mem_alloc(elements.len())?;
        buffer.copy_from_host(&elements)?;
        Ok::<_, Error>(buffer)
    };
    Ok([buffer(0, M)?, buffer(1, N)?])
}

/// Returns the product of a rank's A and B, by a plain loop.
fn product_of(rank: usize) -> Vec<f32> {
    let (a, b) = (elements(rank, 0, M), elements(rank, 1, N));
    let mut c = vec![0.0; M * N];
    for (i, c) in c.iter_mut().enumerate() {
        let (row, column) = (&a[i / N * K..][..K], &b[i % N * K..][..K]);
        *c = row.iter().zip(column).map(|(a, b)| a * b).sum();
    }
    c
}

/// Checks every element of C.
fn check<T: Element + Default + PartialEq>(
    c: &impl Buffer<Element = T>,
    stream: &Stream,
    right: &[T],
) -> Result<(), Error> {
    let mut found = vec![T::default(); right.len()];
    stream.copy_to_host(c, &mut found)?;
    let wrong = found.iter().zip(right).position(|(found, right)| found != right);
    assert_eq!(wrong, None, "the first element of C that is wrong");
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
    let parts: Vec<Vec<f32>> = (0..ranks).map(product_of).collect();
    let sums: Vec<f32> = (0..count).map(|i| parts.iter().map(|part| part[i]).sum()).collect();
    let (part, c) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;

    let own = comm.mem_alloc::<f32>(count)?;
    // SAFETY: the kernels' contracts; each launch has ended before the next one.
    unsafe { product::args(&a, &b, &own, m, n, k).grid(tiles).block(THREADS).launch(&stream)? };
    check(&own, &stream, &parts[rank.rank()])?;

    let launch = product_then_reduce::args(&dev, &a, &b, &part, &c, m, n, k);
    // SAFETY: the buffers have the elements of the problem's shape.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check(&c, &stream, &sums)?;

    let slots = ranks * (tiles as usize).div_ceil(ranks);
    let inbox = comm.window::<f32>(slots * (TILE * TILE) as usize)?;
    let flags = comm.window::<u32>(slots)?;
    let epoch = comm.mem_alloc::<u32>(Epoch::WORDS)?;
    for _ in 0..2 {
        stream.fill(&c, f32::NAN)?;
        let launch = product_all_reduce::args(&dev, &a, &b, &inbox, &flags, &epoch, &c, m, n, k);
        // SAFETY: the buffers have the elements of the problem's shape.
        unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
        check(&c, &stream, &sums)?;
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
    let parts: Vec<Vec<f32>> = (0..ranks).map(product_of).collect();
    let rounded = |part: &Vec<f32>, i: usize| bf16::from_f32(part[i]).to_f32();
    let sum = |i: usize| parts.iter().map(|part| rounded(part, i)).sum::<f32>();
    let sums: Vec<bf16> = (0..M * N).map(|i| bf16::from_f32(sum(i))).collect();
    let activated: Vec<bf16> =
        (0..M * N).map(|i| bf16::from_f32((sum(i) - 1.5).max(0.0))).collect();
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    let parts = 3 * ranks; // of three tiles
    let (inbox, flags) = (comm.window::<bf16>(2 * parts * ELEMENTS)?, comm.window::<u32>(parts)?);
    let state = comm.mem_alloc::<u32>(TileExchange::<bf16>::STATE)?;
    let (bias, c) = (comm.mem_alloc::<f32>(N)?, comm.mem_alloc::<bf16>(M * N)?);
    stream.fill(&bias, -1.5)?;
    // The inbox has two banks, so that the third launch uses the first one again.
    for _ in 0..3 {
        stream.fill(&c, bf16::NAN)?;
        let launch = product_exchange::args(&dev, &a, &b, &inbox, &flags, &state, &c, m, n, k);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
        check(&c, &stream, &sums)?;
    }
    let launch =
        product_exchange_relu::args(&dev, &a, &b, &inbox, &flags, &state, &bias, &c, m, n, k);
    // SAFETY: the buffers have the elements of the problem's shape.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check(&c, &stream, &activated)
}
// ANCHOR_END: exchange
