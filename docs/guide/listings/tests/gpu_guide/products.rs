//! The steps from a product to a product fused with an all-reduce.

use devcomm::{Buffer, DevCommRequirements, Error, Rank, Stream, SymmetricBuffer};
use devcomm_testing::gemm::{Factor, Problem};
use half::bf16;
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
