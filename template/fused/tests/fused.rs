//! Compares the fused product with one on the host.

use devcomm::{Error, Rank, SymmetricBuffer};
use half::bf16;

use {{crate_name}}::fused::FusedProduct;

/// A shape with tiles that are cut off in each direction, and terms that do not fill the last
/// stage.
const SHAPE: [usize; 3] = [20, 264, 72];

/// Returns whole numbers from -2 to 2, so that sums are exact.
fn elements(rank: usize, matrix: usize, count: usize) -> Vec<bf16> {
    let number = |i: usize| (7 * i + 3 * rank + 5 * matrix + i / 11) % 5;
    (0..count).map(|i| bf16::from_f32(number(i) as f32 - 2.0)).collect()
}

fn product(rank: usize) -> Vec<f32> {
    let [m, n, k] = SHAPE;
    let (a, b) = (elements(rank, 0, m * k), elements(rank, 1, n * k));
    let element = |i: usize| -> f32 {
        let (row, column) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
        row.iter().zip(column).map(|(a, b)| a.to_f32() * b.to_f32()).sum()
    };
    (0..m * n).map(|i| bf16::from_f32(element(i)).to_f32()).collect()
}

#[devcomm::test(ranks = 2)]
fn every_rank_gets_the_sum_of_the_products(rank: &Rank) -> Result<(), Error> {
    let [m, n, k] = SHAPE;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let matrix = |number, count| -> Result<SymmetricBuffer<bf16>, Error> {
        let matrix = comm.mem_alloc(count)?;
        matrix.copy_from_host(&elements(rank.rank(), number, count))?;
        Ok(matrix)
    };
    let (a, b) = (matrix(0, m * k)?, matrix(1, n * k)?);
    let fused = FusedProduct::new(rank, [&a, &b], SHAPE)?;
    // The product keeps them.
    drop((a, b));
    let parts: Vec<Vec<f32>> = (0..rank.n_ranks()).map(product).collect();
    // A second launch finds what the first one has left in memory.
    for launch in 0..2 {
        fused.launch(&stream)?;
        let mut found = vec![bf16::NAN; m * n];
        stream.copy_to_host(fused.c(), &mut found)?;
        for (i, found) in found.into_iter().enumerate() {
            let right = bf16::from_f32(parts.iter().map(|part| part[i]).sum());
            assert_eq!(found, right, "launch {launch}, element {i} on rank {}", rank.rank());
        }
    }
    Ok(())
}
