//! The softmax of the rows of a product.

// ANCHOR: test
use devcomm::{Error, Rank};
use half::bf16;
use kernels::softmax::{THREADS, TILE, softmax_scores};
use norm::KERNELS;

#[devcomm::test(ranks = 1)]
fn each_row_of_scores_becomes_its_softmax(rank: &Rank) -> Result<(), Error> {
    const TERMS: usize = 40;
    const SCALE: f32 = 0.125;
    let (queries, keys) = (TILE as usize, 3 * TILE as usize);
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    // Whole numbers from -4 to 4, so that the scores are exact.
    let numbers = |seed: u32, rows: usize| -> Vec<f32> {
        let mixed = (seed..).map(|i| i.wrapping_mul(2_654_435_761) >> 24);
        mixed.map(|bits| bits as f32 % 9.0 - 4.0).take(rows * TERMS).collect()
    };
    let on_gpu = |numbers: &[f32]| {
        let rounded: Vec<bf16> = numbers.iter().copied().map(bf16::from_f32).collect();
        let buffer = comm.mem_alloc::<bf16>(rounded.len())?;
        buffer.copy_from_host(&rounded)?;
        Ok::<_, Error>(buffer)
    };
    let (q, k) = (numbers(1, queries), numbers(1_000_003, keys));
    let (on_q, on_k) = (on_gpu(&q)?, on_gpu(&k)?);
    let p = comm.mem_alloc::<bf16>(queries * keys)?;
    let sizes = [queries, keys, TERMS].map(|size| size as u32);
    let launch = softmax_scores::args(&on_q, &on_k, &p, sizes[0], sizes[1], sizes[2], SCALE);
    // SAFETY: the kernel's contract: the buffers have the elements.
    unsafe { launch.grid(1).block(THREADS).launch(&stream)? };
    let mut got = vec![bf16::NAN; queries * keys];
    stream.copy_to_host(&p, &mut got)?;
    for (q, got) in q.chunks(TERMS).zip(got.chunks(keys)) {
        let score = |k: &[f32]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * SCALE;
        let powers: Vec<f64> = k.chunks(TERMS).map(|k| f64::from(score(k)).exp()).collect();
        let sum: f64 = powers.iter().sum();
        for (got, power) in got.iter().zip(powers) {
            let (got, want) = (f64::from(got.to_f32()), power / sum);
            // The rounding to bf16 is 1/512 of a result; powers that are nearly 0 may become 0.
            assert!((got - want).abs() <= want / 200.0 + 1e-30, "{got}, not {want}");
        }
    }
    Ok(())
}
// ANCHOR_END: test
