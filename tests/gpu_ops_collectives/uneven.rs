//! Tests that ranks whose GPUs have different numbers of multiprocessors launch the same kernels.

use devcomm::{
    Buffer, CollectivesOptions, Communicator, Rank, ReduceOp, Result, Simulation, Stream, Window,
};
use devcomm_testing::machines::Gpus;

/// Returns a window of ones.
fn ones(comm: &Communicator, stream: &Stream, count: usize) -> Result<Window<f32>> {
    let window = comm.window(count)?;
    stream.fill(&window, 1.0)?;
    Ok(window)
}

fn require(window: &Window<f32>, value: f32) -> Result<()> {
    let mut got = vec![0.0; window.len()];
    window.copy_to_host(&mut got)?;
    assert!(got.iter().all(|got| (got - value).abs() < 1e-5), "{}, not {value}", got[0]);
    Ok(())
}

/// Does operations whose kernel or grid follows from the multiprocessors. The world is checked: it
/// compares the ranks' plans.
fn operations(rank: &Rank, objects: u32) -> Result<()> {
    let (comm, stream, ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    // Messages of at most 6144 vectors.
    let options = CollectivesOptions::new().concurrent(objects).lamport_bytes(96 << 10);
    let collectives = options.build(comm)?;
    // Of four ranks, three multiprocessors do the second and the third in one step, two do not.
    for vectors in [300, 1200, 5000] {
        let [x, y] = [ones(comm, &stream, 4 * vectors)?, ones(comm, &stream, 4 * vectors)?];
        let part = x.slice(..4 * vectors / ranks)?;
        collectives.all_to_all(&x, &y, &stream)?;
        collectives.all_gather(&part, &y, &stream)?;
        collectives.all_reduce(&x, &y, ReduceOp::Sum, &stream)?;
        require(&y, ranks as f32)?;
        collectives.reduce_scatter(&y, &part, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
    }
    // Clusters of one block, for each of which one row is normalised at a time.
    for tokens in [3, 80] {
        let [x, residual] = [ones(comm, &stream, 4 * tokens)?, ones(comm, &stream, 4 * tokens)?];
        let weight = ones(comm, &stream, 4)?;
        collectives.all_reduce_rmsnorm(&x, &residual, &weight, &x, 0.0, &stream)?;
        stream.synchronize()?;
        require(&residual, ranks as f32 + 1.0)?;
        require(&x, 1.0)?;
    }
    Ok(())
}

#[test]
fn ranks_whose_gpus_differ_do_the_same_operations() {
    for (ranks, objects) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
        let gpus = Gpus::from(Simulation::new(ranks).multiprocessors_in_turn([3, 2]));
        gpus.run("ranks_whose_gpus_differ_do_the_same_operations", |rank| {
            operations(rank, objects)
        });
    }
}
