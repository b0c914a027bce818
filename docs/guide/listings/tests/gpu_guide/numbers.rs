//! A test of the softmax of rows whose columns are divided among the ranks.

// ANCHOR: test
use devcomm::{Error, Rank};
use norm::KERNELS;
use norm::kept::Softmax;

#[devcomm::test(ranks = 3)]
fn rows_that_are_divided_among_ranks_sum_to_one(rank: &Rank) -> Result<(), Error> {
    const ROWS: usize = 10; // more than the 8 blocks
    const COLUMNS: usize = 37; // a lane has one element or two
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let softmax = Softmax::new(comm, &stream, ROWS as u32, COLUMNS as u32)?;
    for launch in 0..3 {
        let element = |rank: usize, i: usize| ((7 * i + 5 * rank + launch) % 11) as f32 - 5.0;
        let mine: Vec<f32> = (0..ROWS * COLUMNS).map(|i| element(rank.rank(), i)).collect();
        stream.copy_to_device(&mine, softmax.x())?;
        softmax.launch()?;
        let mut found = vec![0.0; ROWS * COLUMNS];
        stream.copy_to_host(softmax.x(), &mut found)?;
        for (i, found) in found.into_iter().enumerate() {
            let row = i / COLUMNS * COLUMNS..(i / COLUMNS + 1) * COLUMNS;
            let all = (0..rank.n_ranks()).flat_map(|rank| row.clone().map(move |i| (rank, i)));
            let sum: f32 = all.map(|(rank, i)| element(rank, i).exp()).sum();
            let right = mine[i].exp() / sum;
            assert!((found - right).abs() < 1e-5 * right, "{i}: {found}, {right}");
        }
    }
    Ok(())
}
// ANCHOR_END: test
