//! The steps from a product to a product fused with an all-reduce.

use devcomm::device::TileExchange;
use devcomm::{Buffer, DevCommRequirements, Error, Rank, Stream, SymmetricBuffer};
use devcomm_testing::gemm::{Factor, Problem};
use half::bf16;
use kernels::exchange::{ELEMENTS, product_exchange, product_exchange_relu};
use kernels::products::{THREADS, TILE, product, product_all_reduce, product_then_reduce};
use norm::KERNELS;

/// Three tiles of C, and terms that are no multiple of a stage's.
const PROBLEM: Problem = Problem { m: TILE as usize, n: 3 * TILE as usize, k: 40, seed: 4 };

/// A rank's factors in its memory.
fn factors(rank: &Rank) -> Result<[SymmetricBuffer<bf16>; 2], Error> {
    let buffer = |factor, rows| {
        let buffer = SymmetricBuffer::new(rank.library(), rank.context(), rows * PROBLEM.k)?;
        buffer.copy_from_host(&PROBLEM.factor::<bf16>(factor, rank.rank()))?;
        Ok::<_, Error>(buffer)
    };
    Ok([buffer(Factor::A, PROBLEM.m)?, buffer(Factor::B, PROBLEM.n)?])
}

/// Checks C, the sum of the products of these ranks.
fn check(
    c: &impl Buffer<Element = f32>,
    ranks: std::ops::Range<usize>,
    stream: &Stream,
) -> Result<(), Error> {
    let mut found = vec![0.0_f32; PROBLEM.m * PROBLEM.n];
    stream.copy_to_host(&c.device_slice(), &mut found)?;
    assert_eq!(PROBLEM.count_wrong(ranks, &found, PROBLEM.all()), 0);
    Ok(())
}

// ANCHOR: steps
#[devcomm::test(ranks = 2)]
fn each_step_computes_its_product(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [a, b] = factors(rank)?;
    let (count, tiles, ranks) = (PROBLEM.m * PROBLEM.n, 3, rank.n_ranks());
    let (part, c) = (comm.window::<f32>(count)?, comm.window::<f32>(count)?);
    let [m, n, k] = PROBLEM.shape().map(|extent| extent as u32);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;

    let own = SymmetricBuffer::<f32>::new(rank.library(), rank.context(), count)?;
    // SAFETY: the kernels' contracts; each launch has ended before the next one.
    unsafe { product::args(&a, &b, &own, m, n, k).grid(tiles).block(THREADS).launch(&stream)? };
    check(&own, rank.rank()..rank.rank() + 1, &stream)?;

    let launch = product_then_reduce::args(&dev, &a, &b, &part, &c, m, n, k);
    // SAFETY: as above.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check(&c, 0..ranks, &stream)?;

    let slots = ranks * (tiles as usize).div_ceil(ranks);
    let inbox = comm.window::<f32>(slots * (TILE * TILE) as usize)?;
    let flags = comm.window::<u32>(slots)?;
    let epoch = SymmetricBuffer::<u32>::new(rank.library(), rank.context(), 2)?;
    flags.fill_bytes(0)?;
    epoch.fill_bytes(0)?;
    rank.barrier()?;
    for _ in 0..2 {
        let launch = product_all_reduce::args(&dev, &a, &b, &inbox, &flags, &epoch, &c, m, n, k);
        // SAFETY: as above.
        unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
        check(&c, 0..ranks, &stream)?;
    }
    Ok(())
}
// ANCHOR_END: steps

/// Checks C, of which each element is what `of` makes of the sum of the ranks' rounded products.
fn check_rounded(
    c: &impl Buffer<Element = bf16>,
    ranks: usize,
    stream: &Stream,
    of: impl Fn(f32) -> f32,
) -> Result<(), Error> {
    let mut found = vec![bf16::NAN; PROBLEM.m * PROBLEM.n];
    stream.copy_to_host(&c.device_slice(), &mut found)?;
    for (row, column) in PROBLEM.all() {
        let product = |rank| PROBLEM.exact(rank..rank + 1, row, column) as f32;
        let sum = (0..ranks).fold(0.0, |sum, rank| sum + bf16::from_f32(product(rank)).to_f32());
        let right = bf16::from_f32(of(sum));
        assert_eq!(found[row * PROBLEM.n + column], right, "({row}, {column})");
    }
    Ok(())
}

// ANCHOR: exchange
#[devcomm::test(ranks = 3)]
fn tiles_that_are_pushed_are_added_in_all_ranks(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream, ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    let [a, b] = factors(rank)?;
    let [m, n, k] = PROBLEM.shape().map(|extent| extent as u32);
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    let parts = 3 * ranks;
    let (inbox, flags) = (comm.window::<bf16>(2 * parts * ELEMENTS)?, comm.window::<u32>(parts)?);
    let state = comm.mem_alloc::<u32>(TileExchange::<bf16>::STATE)?;
    let (bias, c) =
        (comm.mem_alloc::<f32>(PROBLEM.n)?, comm.mem_alloc::<bf16>(PROBLEM.m * PROBLEM.n)?);
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
        check_rounded(&c, ranks, &stream, |sum| sum)?;
    }
    let launch =
        product_exchange_relu::args(&dev, &a, &b, &inbox, &flags, &state, &bias, &c, m, n, k);
    // SAFETY: as above.
    unsafe { launch.grid(2).block(THREADS).launch(&stream)? };
    check_rounded(&c, ranks, &stream, |sum| (sum - 1.5).max(0.0))
}
// ANCHOR_END: exchange
